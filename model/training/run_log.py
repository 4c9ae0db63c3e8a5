"""What a run says and leaves behind: log lines, a progress bar on terminals, TensorBoard events, run.json, loss.png.

Log lines have Megatron's form. run.json holds every iteration's loss and gradient norm at full precision.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import hal
from hal import HalError

from .config import Config
from .files import make_folder, write_bytes, write_text
from .flops import flops_per_token
from .tracking import trackers
from .trainer import StepResult, options, peak_memory_bytes


class Silence:
    """In place of a Report on processes that do not speak for the run."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def say(self, text: str) -> None:
        """Nothing."""

    def step(self, result: StepResult) -> None:
        """Nothing."""

    def evaluation(self, iteration: int, loss: float) -> None:
        """Nothing."""

    def record(self) -> None:
        """Nothing."""

    def finish(self, prompt: str, text: str) -> None:
        """Nothing."""

    def tokens_per_second(self) -> float:
        """Unknown here."""
        return 0.0


class Report:
    """Collects a run's results. Use as a context manager: leaving it closes the bar and the event file.

    However the run ends, run.json holds the iterations it made; killed, those up to its last checkpoint.
    """

    def __init__(self, config: Config, folder: Path, start: int) -> None:
        self.config, self.folder = config, make_folder(folder)
        self.losses: list[list[Any]] = []
        self.grad_norms: list[list[Any]] = []
        self.evaluations: list[list[Any]] = []
        self.step_seconds: list[list[Any]] = []
        if start:
            self._continue(start)
        assert config.global_batch_size
        self.tokens_per_step = config.global_batch_size * config.seq_length
        self.flops_per_token = flops_per_token(config)
        self._since_log: list[StepResult] = []
        self._seconds: list[float] = []
        self._finished = False
        self._trackers = trackers(config, self.folder, options(config))
        self._bar = _Bar(start, config.train_iters) if sys.stdout.isatty() else None

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and self._seconds and not self._finished:
            with contextlib.suppress(OSError):  # a full disk, maybe: what went wrong first is to be heard
                self.finish("", "")
        if self._bar is not None:
            self._bar.close()
        for tracker in self._trackers:
            tracker.close()

    def say(self, text: str) -> None:
        """One line on the terminal, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.print(text)
        else:
            print(text, flush=True)

    def step(self, result: StepResult) -> None:
        """Records an iteration; prints a line every log_interval."""
        self.losses.append([result.iteration, result.loss])
        self.grad_norms.append([result.iteration, result.grad_norm])
        self._since_log.append(result)
        self.step_seconds.append([result.iteration, result.seconds])
        self._seconds.append(result.seconds)
        tokens_per_second = self.tokens_per_step / result.seconds
        self._scalars(
            result.iteration,
            {
                "lm loss": result.loss,
                "grad-norm": result.grad_norm,
                "learning-rate": result.lr,
                "loss-scale": result.loss_scale,
                "tokens-per-second": tokens_per_second,
            },
        )
        if self._bar is not None:
            self._bar.update(result.iteration, f"loss {result.loss:.4f}  {tokens_per_second:,.0f} tok/s")
        if result.iteration % self.config.log_interval == 0 or result.iteration == self.config.train_iters:
            self.say(self._line())
            self._since_log.clear()

    def evaluation(self, iteration: int, loss: float) -> None:
        """Records and prints an evaluation."""
        self.evaluations.append([iteration, loss])
        self._scalars(iteration, {"lm loss validation": loss})
        perplexity = math.exp(20.0 if loss > 20.0 else loss)  # of NaN, NaN
        self.say(
            f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
        )

    def record(self) -> None:
        """Writes run.json for whoever continues from the checkpoint to come; if it cannot, the run's end says so."""
        with contextlib.suppress(OSError):
            self._write_record()

    def finish(self, prompt: str, text: str) -> None:
        """Writes run.json, loss.png and sample.txt."""
        self._finished = True
        self._write_record()
        write_text(self.folder / "sample.txt", f"[prompt]\n{prompt}\n[generated]\n{text}\n")
        if self.losses:
            _plot(self.folder / "loss.png", self.losses, self.evaluations)

    def tokens_per_second(self) -> float:
        """Mean speed of this process's steps, without its first (caches and kernels warm up there)."""
        steady = self._seconds[1:] or self._seconds
        return self.tokens_per_step * len(steady) / sum(steady) if steady else 0.0

    def _line(self) -> str:
        steps, last, c = self._since_log, self._since_log[-1], self.config
        seconds = sum(s.seconds for s in steps) / len(steps)
        speed = self.tokens_per_step / seconds
        losses = [s.loss for s in steps if not s.skipped]
        assert c.global_batch_size
        cells = [
            f"iteration {last.iteration:8d}/{c.train_iters:8d}",
            f"consumed samples: {last.consumed:12d}",
            f"elapsed time per iteration (ms): {1000 * seconds:.1f}",
            f"tokens per second: {speed:.1f}",
            f"model GFLOP/s: {speed * self.flops_per_token / 1e9:.1f}",
            f"learning rate: {last.lr:.6E}",
            f"global batch size: {c.global_batch_size:5d}",
            *([f"lm loss: {sum(losses) / len(losses):.6E}"] if losses else []),
            f"loss scale: {last.loss_scale:.1f}",
            *([f"grad norm: {last.grad_norm:.3f}"] if last.grad_norm is not None else []),
            f"number of skipped iterations: {sum(s.skipped for s in steps):3d}",
        ]
        return f" [{datetime.datetime.now():%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(cells) + " |"

    def _scalars(self, iteration: int, values: dict[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.scalars(iteration, known)

    def _write_record(self) -> None:
        write_text(self.folder / "run.json", json.dumps(self._record(), indent=1, allow_nan=False) + "\n")

    def _record(self) -> dict[str, Any]:
        backend = hal.backend()
        probe = backend.probe()
        versions = {"python": platform.python_version(), "hal": hal.__version__}
        versions.update({name: _version(name) for name in ("torch", "numpy", "megatron-core")})
        return {
            "config": options(self.config),
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
            "losses": [[n, _finite(v)] for n, v in self.losses],
            "grad_norms": [[n, _finite(v)] for n, v in self.grad_norms],
            "evaluations": [[n, _finite(v)] for n, v in self.evaluations],
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second(),
            "model_flops_per_second": self.tokens_per_second() * self.flops_per_token,
            "peak_memory_bytes": peak_memory_bytes(),
        }

    def _continue(self, start: int) -> None:
        """Takes over what an earlier process recorded in this folder, up to the iteration the run resumes from."""
        path = self.folder / "run.json"
        if not path.is_file():
            return
        try:
            record = json.loads(path.read_text())
            record.setdefault("step_seconds", [])
            for name in ("losses", "grad_norms", "evaluations", "step_seconds"):
                setattr(self, name, [row for row in record[name] if row[0] <= start])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise HalError(f"{path} is not a run's record ({error}); remove it or use another --run-dir") from None


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
    FigureCanvasAgg(figure).print_png(image)
    write_bytes(path, image.getvalue())


class _Bar:
    """rich's progress bar."""

    def __init__(self, start: int, total: int) -> None:
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError as error:
            raise HalError(f"the progress bar needs rich ({error}); pip install 'torch-hal[train]'") from None
        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()
        )
        self._task = self._progress.add_task("", total=total, completed=start, text="")
        self._progress.start()
        self.print: Callable[[str], None] = lambda text: self._progress.console.print(
            text, markup=False, highlight=False
        )

    def update(self, iteration: int, text: str) -> None:
        self._progress.update(self._task, completed=iteration, text=text)

    def close(self) -> None:
        self._progress.stop()
