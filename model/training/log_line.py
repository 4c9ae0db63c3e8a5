"""The line of a log interval: Megatron's, which scripts read, or a compact one beside a terminal's progress bar."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from ..config.schema import Config
from ..config.validation import world_size
from .step_result import StepResult


def mean_loss(steps: Sequence[StepResult]) -> float | None:
    """The mean loss of the steps that were not skipped; None if all were."""
    losses = [s.loss for s in steps if not s.skipped]
    return sum(losses) / len(losses) if losses else None


def _speed(steps: Sequence[StepResult], config: Config) -> float:
    """Tokens per second."""
    return sum(s.batch_size for s in steps) * config.seq_length / sum(s.seconds for s in steps)


def megatron_line(steps: Sequence[StepResult], config: Config, flops_per_token: float) -> str:
    """Megatron's line on an interval of at least one step: losses, times and speeds are means, the rest of its last."""
    last, speed, loss = steps[-1], _speed(steps, config), mean_loss(steps)
    seconds = sum(s.seconds for s in steps) / len(steps)
    cells = [
        f"iteration {last.iteration:8d}/{config.train_iters:8d}",
        f"consumed samples: {last.consumed:12d}",
        f"elapsed time per iteration (ms): {1000 * seconds:.1f}",
        *_throughput(speed * flops_per_token, config),
        f"tokens per second: {speed:.1f}",
        f"model GFLOP/s: {speed * flops_per_token / 1e9:.1f}",
        f"learning rate: {last.lr:.6E}",
        f"global batch size: {last.batch_size:5d}",
        *([f"lm loss: {loss:.6E}"] if loss is not None else []),
        f"loss scale: {last.loss_scale:.1f}",
        *([f"grad norm: {last.grad_norm:.3f}"] if last.grad_norm is not None else []),
        *_expert_cells(last),
        f"number of skipped iterations: {sum(s.skipped for s in steps):3d}",
    ]
    return f" [{datetime.datetime.now():%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(cells) + " |"


def _throughput(flops_per_second: float, config: Config) -> list[str]:
    """Megatron's cell of --log-throughput."""
    per_device = flops_per_second / 1e12 / world_size(config)
    return [f"throughput per GPU (TFLOP/s/GPU): {per_device:.3f}"] if config.log_throughput else []


def _expert_cells(last: StepResult) -> list[str]:
    if last.experts is None:
        return []
    cells = [f"{name.replace('_', ' ')}: {value:.6E}" for name, value in last.experts.losses.items()]
    return [*cells, f"largest expert load: {max(last.experts.imbalance().values()):.2f}"]


def compact_line(steps: Sequence[StepResult], config: Config, flops_per_token: float) -> str:
    """At most 80 columns of the same for people. What is as usual (no skipped step, a loss scale of 1) is left out."""
    last, speed, loss = steps[-1], _speed(steps, config), mean_loss(steps)
    skipped = sum(s.skipped for s in steps)
    cells = [
        f"{last.iteration:>{len(str(config.train_iters))}}/{config.train_iters}",
        "no loss" if loss is None else f"loss {loss:.4f}",
        *([f"norm {last.grad_norm:.2f}"] if last.grad_norm is not None else []),
        f"lr {last.lr:.1e}",
        f"{speed:,.0f} tok/s",
        f"{speed * flops_per_token / 1e9:,.0f} GFLOP/s",
        *([f"load {max(last.experts.imbalance().values()):.2f}"] if last.experts is not None else []),
        *([f"scale {last.loss_scale:g}"] if last.loss_scale != 1.0 else []),
        *([f"skipped {skipped}"] if skipped else []),
    ]
    return " " + "  ".join(cells)
