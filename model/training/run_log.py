"""The output of a training run: log lines, a progress bar on terminals, TensorBoard events, run.json and loss.png.

Log lines have Megatron's format, except on a terminal (see log_line.py). run.json holds the loss and the gradient norm
of every iteration at full precision.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import hal
from hal import HalError
from hal.untrusted import one_line, shown

from ..common.atomic_files import make_folder, write_bytes, write_text
from ..common.progress_bar import ProgressBar
from ..config.flops import flops_per_token
from ..config.schema import Config
from ..config.validation import world_size
from .expert_load import ExpertReport
from .log_line import compact_line, megatron_line
from .step_result import StepResult
from .trackers import trackers
from .trainer import peak_memory_bytes
from .trainer_state import options
from .verified_calls import VerifiedCalls


class NullRunLog:
    """Takes the place of a RunLog on all ranks but the first, and does nothing."""

    def __enter__(self) -> NullRunLog:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def write_line(self, text: str) -> None:
        """Does nothing."""

    def step(self, result: StepResult) -> None:
        """Does nothing."""

    def evaluation(self, iteration: int, loss: float) -> None:
        """Does nothing."""

    def scalars(self, iteration: int, values: Mapping[str, float | None]) -> None:
        """Does nothing."""

    def record(self) -> None:
        """Does nothing."""

    def finish(self, prompt: str, text: str) -> None:
        """Does nothing."""

    def tokens_per_second(self) -> float:
        """0, since nothing is measured."""
        return 0.0


RECORD_SECONDS = 10.0
"""Least seconds between two times at which run.json is written, checkpoints apart."""

_MOST = 1e300
"""Largest number that is taken over from an earlier record."""


class RunLog:
    """Collects the results of a run. Use it as a context manager, which closes the progress bar and the event files.

    run.json is written while training goes on, every RECORD_SECONDS or more, before each checkpoint and at the end. It
    contains all iterations of a run that ended or failed; if a run was killed, those until it was last written.
    """

    def __init__(self, config: Config, folder: Path, start: int, verified: VerifiedCalls | None = None) -> None:
        self.config, self.folder, self._verified = config, make_folder(folder), verified
        self.losses: list[list[Any]] = []
        self.grad_norms: list[list[Any]] = []
        self.evaluations: list[list[Any]] = []
        self.step_seconds: list[list[Any]] = []
        self.expert_imbalance: list[list[Any]] = []
        self.router_entropy: list[list[Any]] = []
        self.expert_loads: list[list[Any]] = []
        self.tokenizer: dict[str, Any] | None = None
        """Its type, fingerprint and bytes per token, see data/text_size.py."""
        self._collapsed: set[int] = set()
        if start:
            self._continue(start)
        self.flops_per_token = flops_per_token(config)
        self._since_log: list[StepResult] = []
        self._seconds: list[float] = []
        self._tokens: list[int] = []
        self._finished = False
        self._next_record = 0.0
        self._trackers = trackers(config, self.folder, options(config))
        self._bar = ProgressBar(config.train_iters, stream=sys.stdout, counted=True)
        self._bar.update(start)
        compact = config.log_format == "compact" or (config.log_format == "auto" and self._bar.shown)
        self._line = compact_line if compact else megatron_line

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        verified = self._verified is not None and self._verified.report() is not None
        if kind is not None and (self._seconds or verified) and not self._finished:
            # A second error, e.g. because of a full disk, must not hide the one that ended the run.
            with contextlib.suppress(OSError):
                self.finish("", "")
        self._bar.close()
        for tracker in self._trackers:
            tracker.close()

    def write_line(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        self._bar.print(text)

    def step(self, result: StepResult) -> None:
        """Records an iteration, and prints a line every log_interval and after the first iteration of a run."""
        self.losses.append([result.iteration, result.loss])
        self.grad_norms.append([result.iteration, result.grad_norm])
        self._since_log.append(result)
        self.step_seconds.append([result.iteration, result.seconds])
        self._seconds.append(result.seconds)
        self._tokens.append(result.batch_size * self.config.seq_length)
        tokens_per_second = self._tokens[-1] / result.seconds
        self.scalars(
            result.iteration,
            {
                "lm loss": result.loss,
                "grad-norm": result.grad_norm,
                "learning-rate": result.lr,
                "loss-scale": result.loss_scale,
                "tokens-per-second": tokens_per_second,
                "throughput": tokens_per_second * self.flops_per_token / 1e12 / world_size(self.config)
                if self.config.log_throughput
                else None,
            },
        )
        if result.experts is not None:
            self._experts(result.iteration, result.experts)
        self._bar.update(result.iteration, f"loss {result.loss:.4f}  {tokens_per_second:,.0f} tok/s")
        if result.iteration % self.config.log_interval == 0 or result.iteration == self.config.train_iters:
            self.write_line(self._line(self._since_log, self.config, self.flops_per_token))
            if self._verified is not None and self._verified.line():
                self.write_line(self._verified.line())
            self._warn_of_collapse(result)
            self._since_log.clear()
            if time.monotonic() >= self._next_record:
                self.record()
        elif result.iteration == 1:  # the interval goes on, so that its means do not depend on this line
            self.write_line(self._line(self._since_log, self.config, self.flops_per_token))

    def _experts(self, iteration: int, experts: ExpertReport) -> None:
        """Records the load of the experts: the worst layer, or with --moe-per-layer-logging every layer."""
        imbalance = experts.imbalance()
        self.expert_imbalance.append([iteration, max(imbalance.values())])
        self.router_entropy.append([iteration, min(experts.entropy.values())])
        scalars: dict[str, float | None] = {f"moe/{name}": value for name, value in experts.losses.items()}
        scalars |= {"moe/imbalance": self.expert_imbalance[-1][1], "moe/router-entropy": self.router_entropy[-1][1]}
        if self.config.moe_expert_capacity_factor is not None:
            scalars["moe/dropped"] = experts.dropped
        if self.config.moe_per_layer_logging:
            self.expert_loads.append([iteration, {str(layer): load for layer, load in experts.load.items()}])
            scalars |= {f"moe/imbalance/layer-{n}": value for n, value in imbalance.items()}
            scalars |= {f"moe/router-entropy/layer-{n}": value for n, value in experts.entropy.items()}
        self.scalars(iteration, scalars)

    def _warn_of_collapse(self, result: StepResult) -> None:
        """Warns once of each layer whose router sends all tokens to the same experts."""
        collapsed = result.experts.collapsed(self.config.moe_router_topk) if result.experts is not None else []
        new = [layer for layer in collapsed if layer not in self._collapsed]
        self._collapsed.update(new)
        if new:
            self.write_line(
                f" warning: the routers of layers {', '.join(map(str, new))} have collapsed: all tokens use hardly "
                f"more than {self.config.moe_router_topk} of {self.config.num_experts} experts. Raise "
                "--moe-aux-loss-coeff, or use --moe-router-enable-expert-bias"
            )

    def evaluation(self, iteration: int, loss: float) -> None:
        """Records and prints an evaluation."""
        self.evaluations.append([iteration, loss])
        self.scalars(iteration, {"lm loss validation": loss})
        # Limited as in Megatron. `min` would turn a NaN loss into a finite perplexity.
        perplexity = math.exp(20.0 if loss > 20.0 else loss)
        self.write_line(
            f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
        )

    def record(self) -> None:
        """Writes run.json as far as it is known. Ignores OSErrors, which `finish` raises."""
        began = time.monotonic()
        with contextlib.suppress(OSError):
            self._write_record()
        # The file grows with the run; 1 % of the time at most is spent on it.
        seconds = time.monotonic() - began
        self._next_record = began + max(RECORD_SECONDS, 100 * seconds)

    def finish(self, prompt: str, text: str) -> None:
        """Writes run.json, loss.png and sample.txt."""
        self._finished = True
        self._write_record()
        write_text(self.folder / "sample.txt", f"[prompt]\n{prompt}\n[generated]\n{text}\n")
        if self.losses:
            try:
                _plot(self.folder / "loss.png", self.losses, self.evaluations)
            except Exception as error:  # the training has ended, so no defect of matplotlib's setup may change how
                self.write_line(f" loss.png could not be written: {one_line(error)}")

    def tokens_per_second(self) -> float:
        """The mean over the steps of this process, without the first step, which warms up caches and kernels."""
        first = 1 if len(self._seconds) > 1 else 0
        steady, tokens = self._seconds[first:], self._tokens[first:]
        return sum(tokens) / sum(steady) if steady else 0.0

    def scalars(self, iteration: int, values: Mapping[str, float | None]) -> None:
        """Sends metrics of an iteration to the trackers; None is left out."""
        scalars = {name: value for name, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.scalars(iteration, scalars)

    def _write_record(self) -> None:
        write_text(self.folder / "run.json", json.dumps(self._record(), indent=1, allow_nan=False) + "\n")

    def _record(self) -> dict[str, Any]:
        backend = hal.backend()
        probe = backend.probe()
        versions: dict[str, str | None] = {"python": platform.python_version(), "hal": hal.__version__}
        versions.update({name: _version(name) for name in ("torch", "numpy", "megatron-core")})
        return {
            "config": options(self.config),
            "notes": list(self.config.notes),
            "noted": dict(self.config.noted),
            "tokenizer": self.tokenizer,
            "versions": versions,
            "device": {
                "backend": backend.name,
                "simulated": backend.simulated,
                "device": str(hal.device()),
                "count": probe.count,
                "reason": probe.reason,
                "facts": dict(probe.facts),
            },
            "fallbacks": hal.fallbacks(),
            "verified_ops": self._verified.report() if self._verified is not None else None,
            "losses": [[n, _finite(v)] for n, v in self.losses],
            "grad_norms": [[n, _finite(v)] for n, v in self.grad_norms],
            "evaluations": [[n, _finite(v)] for n, v in self.evaluations],
            "step_seconds": self.step_seconds,
            **self._expert_record(),
            "tokens_per_second": self.tokens_per_second(),
            "model_flops_per_second": self.tokens_per_second() * self.flops_per_token,
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def _expert_record(self) -> dict[str, Any]:
        """The load of the experts, for a model that has some: see `_experts`."""
        names = ("expert_imbalance", "router_entropy", "expert_loads")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def _continue(self, start: int) -> None:
        """Reads the record of an earlier process in this folder, up to the iteration from which the run resumes."""
        path = self.folder / "run.json"
        if not path.is_file():
            return
        try:
            record = json.loads(path.read_text())
            rows = ("losses", "grad_norms", "evaluations")
            later = ("step_seconds", "expert_imbalance", "router_entropy", "expert_loads")  # not in every record
            for name in (*rows, *(name for name in later if name in record)):
                setattr(self, name, [_row(row, name) for row in record[name] if row[0] <= start])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise HalError(
                f"{path} is not a run's record ({one_line(error)}); remove it or use another --run-dir"
            ) from None


def _row(row: Any, name: str) -> list[Any]:
    """[iteration, value] of a record, which can be written again. Raises ValueError or TypeError for another row."""
    iteration, value = row
    if name == "expert_loads":
        json.dumps(value, allow_nan=False)
        good = isinstance(value, dict)
    else:
        good = value is None or (isinstance(value, (int, float)) and abs(value) < _MOST)
    if type(iteration) is not int or not good:
        raise ValueError(f"{name} has the row {shown(iteration)}, {shown(value)}")
    return [iteration, value]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _plot(path: Path, losses: list[list[Any]], evaluations: list[list[Any]]) -> None:
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.add_subplot()
    axes.plot(*zip(*losses), linewidth=0.8, label="training")
    if evaluations:
        axes.plot(*zip(*evaluations), marker="o", markersize=3, label="validation")
        axes.legend()
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)  # type: ignore[no-untyped-call]
    write_bytes(path, image.getvalue())
