"""The training loop of one process, in small steps that a parallel trainer can wrap.

A step is: forward and backward over the microbatches; unscale and check; norm; AdamW with clipping. Everything that
decides what a step computes is a function of (config, iteration, samples consumed), so a resumed run is bit-equal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Comm, HalError, Rng, Solo

from . import checkpoint, documents
from .checkpoint import RELEASE
from .config import Config, ConfigError
from .data import Split
from .draws import Draws
from .gpt import GPT
from .optimizer import LossScaler, Optimizer, local
from .saving import Saver
from .schedule import Schedule


class TrainingFailed(HalError):
    """The run cannot go on: the loss or the gradients are not finite."""


@dataclass(frozen=True)
class StepResult:
    """What one iteration did; `consumed` counts all samples so far, grad_norm is None for a skipped step (fp16
    overflow), seconds is its wall time."""

    iteration: int
    consumed: int
    loss: float
    grad_norm: float | None
    lr: float
    loss_scale: float
    skipped: bool
    seconds: float


def _require_progress(state: Mapping[str, Any], folder: Path) -> None:
    """Raises HalError unless a checkpoint's state has what training continues from, as Trainer.state writes it."""
    scaler, rng = state.get("loss_scaler"), state.get("rng")
    numbers = {n: state.get(n) for n in ("consumed_samples", "skipped", "optimizer_steps")}
    wrong = [n for n, value in numbers.items() if type(value) is not int or value < 0]
    if not (isinstance(rng, list) and len(rng) == 2 and all(type(n) is int for n in rng)):
        wrong.append("rng")
    known = {f.name for f in fields(LossScaler)}
    if not isinstance(scaler, dict) or any(
        n not in known or not isinstance(v, (int, float)) for n, v in scaler.items()
    ):
        wrong.append("loss_scaler")
    if wrong:
        raise HalError(f"the checkpoint {folder}: its state has no {', '.join(wrong)}, or not as training writes it")


def _require_same_model(state: Mapping[str, Any], config: Config, folder: Path, *, weights_only: bool) -> None:
    """Raises ConfigError where the checkpoint's model is another in what its weights, by name and shape, do not show:
    that it has more of them, or does something else with them. Weights alone may serve another function."""
    saved, ours = state.get("config"), options(config)
    if not isinstance(saved, dict):
        return
    theirs, here = ({**_structure(o), **({} if weights_only else _function(o))} for o in ({**ours, **saved}, ours))
    for name, value in here.items():
        if theirs[name] != value:
            otherwise = ", or --finetune to begin with its weights alone" if name in _function(ours) else ""
            raise ConfigError(
                f"the checkpoint {folder} was made with {name.replace('_', '-')} {theirs[name]}, this run has {value}; "
                f"give the model options it was saved with{otherwise}"
            )


def _structure(o: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which weights there are, and how they are laid out, of a config's options."""
    absent = sorted({int(n) for n in o["noop_layers"]} & set(range(o["num_layers"])))
    layers = [n for n in range(o["num_layers"]) if n not in absent]
    gapless = layers == list(range(len(layers)))
    names = ("num_attention_heads", "num_query_groups", "position_embedding_type", "normalization", "swiglu", "geglu")
    names += ("disable_bias_linear", "untie_embeddings_and_output_weights", "use_sandwich_norm")
    return {
        "num_layers": str(len(layers)) if gapless else f"{o['num_layers']} without {', '.join(map(str, absent))}",
        **{name: o[name] for name in names},
        "add_qkv_bias": o["add_qkv_bias"] or not o["disable_bias_linear"],
    }


def _function(o: Mapping[str, Any]) -> dict[str, Any]:
    """What decides what a model does with its weights; None where it decides nothing."""
    rope, pre = o["position_embedding_type"] == "rope", o["pre_tokens"]
    return {
        "norm_epsilon": o["norm_epsilon"],
        **{name: o[name] if rope else None for name in ("rotary_base", "rotary_percent", "rotary_interleaved")},
        "gelu_approximate": None if o["swiglu"] else o["gelu_approximate"],
        "pre_tokens": None if pre is None or pre >= o["seq_length"] else pre,
        "next_tokens": min(0, o["next_tokens"] or 0),
    }


class Trainer:
    """A model, its data and its optimizer. `iteration` and `consumed` (samples) are where the run stands."""

    def __init__(self, config: Config, model: GPT, data: dict[str, Split]) -> None:
        self.config, self.model, self.data = config, model, data
        self.device = next(model.parameters()).device
        self.optimizer = self.make_optimizer()
        self.schedule, self.rng = Schedule.of(config), Rng(config.seed)
        self.iteration = self.consumed = self.skipped = 0
        self.saver = Saver(
            self.world,
            background=config.async_save,
            keep=config.keep_checkpoint_max,
            timeout=60.0 * config.distributed_timeout_minutes,
        )

    # What many processes do differently.

    @property
    def world(self) -> Comm:
        """All processes of the run."""
        return Solo()

    @property
    def lead(self) -> bool:
        """Whether this process speaks for the run: prints, and writes its report."""
        return self.world.rank == 0

    def agreed(self, value: int) -> int:
        """The largest of all processes' `value`."""
        return value

    def whole(self) -> GPT:
        """The whole model, for sampling."""
        return self.model

    def parameter_count(self) -> int:
        """How many parameters the whole model has."""
        return sum(p.numel() for p in self.model.parameters())

    def make_optimizer(self) -> Optimizer:
        """The optimizer of what this process holds of the model."""
        return Optimizer(self.config, dict(self.model.named_parameters()))

    # One iteration.

    def microbatches(self, split: str, first: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """(tokens, labels, place in the global batch) of each microbatch of the batch that starts at sample `first`."""
        c = self.config
        assert c.global_batch_size
        for start in range(0, c.global_batch_size, c.micro_batch_size):
            tokens, labels = self.data[split].fetch(first + start, c.micro_batch_size)
            yield tokens.to(self.device), labels.to(self.device), start

    def forward_backward(self) -> Tensor:
        """Gradients of the global batch (times the loss scale), and its mean loss (float32 scalar)."""
        c = self.config
        assert c.global_batch_size
        count = c.global_batch_size // c.micro_batch_size
        stream = self.rng.fork("dropout", self.iteration)
        grad = torch.full((), self.optimizer.scaler.scale / count, device=self.device)
        total = torch.zeros((), device=self.device)
        batches = list(self.microbatches("train", self.consumed))
        for (tokens, labels, start), share in zip(batches, self._shares([b[1] for b in batches])):
            draws = Draws(stream, start, c.global_batch_size) if c.attention_dropout or c.hidden_dropout else None
            starts = self.document_starts("train", tokens)
            # The logits have no name here: they would live through the backward pass, and beside the next microbatch's.
            loss = self.model.loss(self.model(tokens, draws, starts=starts), labels, inplace_backward=True)
            loss.backward(grad * share)
            total += loss.detach() * share
            del loss
            if start == 0 and count > 1:
                self.optimizer.sum_in_place()
        return total / count

    def document_starts(self, split: str, tokens: Tensor) -> Tensor | None:
        """Where each token's document starts, int64 like tokens [b, s], if the model is to know."""
        if not (self.config.reset_position_ids or self.config.reset_attention_mask):
            return None
        return documents.starts(tokens, self.data[split].eod).to(self.device)

    def _shares(self, labels: list[Tensor]) -> list[float]:
        """What each microbatch's mean weighs in the mean over all tokens that count: 1 on average."""
        if not self.config.eod_mask_loss:
            return [1.0] * len(labels)
        counts = [int((x != documents.IGNORED).sum()) for x in labels]
        return [n * len(counts) / max(1, sum(counts)) for n in counts]

    def step(self) -> StepResult:
        """One iteration. Raises TrainingFailed for a loss or gradient that is not finite (fp16: skips the step)."""
        began = time.perf_counter()
        optimizer, lr = self.optimizer, self.schedule.lr(self.optimizer.steps)
        loss = self.forward_backward()
        scale, overflow, norm = optimizer.scaler.scale, False, None
        if self.config.fp16:
            overflow = optimizer.unscale()
        if not overflow:
            norm = optimizer.grad_norm()
            self._require_finite(float(loss), norm)
            optimizer.step(lr, norm)
        optimizer.scaler.update(overflow)
        optimizer.zero_grad()
        self.iteration += 1
        assert self.config.global_batch_size
        self.consumed += self.config.global_batch_size
        self.skipped += overflow
        seconds = time.perf_counter() - began
        return StepResult(self.iteration, self.consumed, float(loss), norm, lr, scale, overflow, seconds)

    def _require_finite(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingFailed(
                f"iteration {self.iteration + 1}: the loss is {loss} and the gradient norm {norm}; nothing was "
                f"updated. Lower --lr, lengthen --lr-warmup-iters, or look at the data around sample {self.consumed}"
            )

    @torch.no_grad()
    def evaluate(self, split: str = "valid") -> float:
        """Mean loss over eval_iters global batches of a split, without dropout."""
        c, total, count = self.config, torch.zeros((), device=self.device), 0
        assert c.global_batch_size
        for batch in range(c.eval_iters):
            batches = list(self.microbatches(split, batch * c.global_batch_size))
            for (tokens, labels, _), share in zip(batches, self._shares([b[1] for b in batches])):
                logits = self.model(tokens, starts=self.document_starts(split, tokens))
                total += self.model.loss(logits, labels) * share
                count += 1
        return float(total) / count

    # Checkpoints.

    def tensors(self, *, mine: bool = True) -> Mapping[str, Tensor]:
        """Every tensor of a checkpoint, by Megatron's names, sharing memory with the run.

        Of many processes each has its pieces, which with `mine` are those that no other process has too.
        """
        optimizer = self.optimizer
        found = {name: p.detach() for name, p in self.model.named_parameters()}
        kinds = {"exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
        for kind, tensors in kinds.items():
            found.update({f"optimizer.state.{kind}.{name}": t for name, t in tensors.items()})
        if optimizer.low:
            found.update({checkpoint.FP32 + name: t for name, t in optimizer.main.items()})
        return found

    def state(self) -> dict[str, Any]:
        """Everything else of a checkpoint, as JSON."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed,
            "skipped": self.skipped,
            "optimizer_steps": self.optimizer.steps,
            "loss_scaler": asdict(self.optimizer.scaler),
            "rng": list(self.rng.state()),
            "config": options(self.config),
        }

    def save(self, root: Path) -> Path:
        """Writes a checkpoint, makes it the latest of `root`, and removes the oldest beyond keep_checkpoint_max.

        With async_save that goes on after the return; `saver` tells when it has ended, and how.
        """
        return self.saver.save(root, self.iteration, self.tensors(), self.state())

    def load_tensors(self, folder: Path, *, moments: bool) -> None:
        """Fills the weights and, with `moments`, the optimizer from a checkpoint's folder."""
        tensors = self.tensors(mine=False)
        checkpoint.load_tensors(folder, checkpoint.sources(tensors, folder, moments=moments))
        for name, parameter in self.optimizer.model.items():
            local(parameter).copy_(self.optimizer.main[name])

    def load(self, root: Path) -> None:
        """Continues from the latest checkpoint of `root`, as far as the config's load options say.

        Of a release, as with finetune, only the weights are taken.
        """
        c = self.config
        folder, state = checkpoint.read_state(root, self.world)
        weights_only = c.finetune or folder.name == RELEASE
        if not weights_only:
            _require_progress(state, folder)
        _require_same_model(state, c, folder, weights_only=weights_only)
        if not (weights_only or c.no_load_rng) and tuple(state["rng"]) != self.rng.state():
            raise ConfigError(
                f"the checkpoint {folder} was made with --seed {state['rng'][0]}, this run has --seed {c.seed}; the "
                "same seed continues it exactly, --no-load-rng goes on with the new one"
            )
        self.load_tensors(folder, moments=not (c.no_load_optim or weights_only))
        if weights_only:
            return
        self.iteration, self.consumed = state["iteration"], state["consumed_samples"]
        self.skipped = state["skipped"]
        if c.no_load_optim:
            return
        self.optimizer.steps = state["optimizer_steps"]
        self.optimizer.scaler.resume(LossScaler(**state["loss_scaler"]))

    # The loop.

    def run(
        self,
        *,
        stop: Callable[[], bool],
        on_step: Callable[[StepResult], None],
        on_evaluation: Callable[[int, float], None],
        on_save: Callable[[Path], None],
        before_save: Callable[[], None] = lambda: None,
    ) -> None:
        """Iterates until train_iters, an exit_interval, or stop(); saves and evaluates at their intervals.

        before_save: called when all that a checkpoint covers is known, before it is written.
        on_save: called with each checkpoint that has become whole, with async_save maybe some iterations later.
        """
        c = self.config
        root = Path(c.save) if c.save else None
        while self.iteration < c.train_iters and not stop():
            on_step(self.step())
            if c.eval_interval and self.iteration % c.eval_interval == 0:
                on_evaluation(self.iteration, self.evaluate())
            if root and c.save_interval and self.iteration % c.save_interval == 0:
                before_save()
                self.save(root)
            for path in self.saver.finished():
                on_save(path)
            if c.exit_interval and self.iteration % c.exit_interval == 0:
                break


def options(config: Config) -> dict[str, Any]:
    """The config's options as JSON values."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name != "given"}


def peak_memory_bytes() -> int:
    """The backend's peak of device memory, or where it does not count, the process's peak resident size."""
    peak = hal.backend().memory_stats().get("peak")
    if peak is None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(peak)
