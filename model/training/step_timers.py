"""Times of a step's phases over the ranks (--timing-log-level), slow ranks (--log-straggler), and memory.

Every rank measures its own phases; at the log interval the ranks exchange their sums, in one message.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence

import torch

import hal
from hal import spans
from hal.spans import Span

from ..config.schema import Config
from .run_log import NullRunLog, RunLog
from .step_result import StepResult
from .trainer import Trainer, peak_memory_bytes

LEVELS = {
    "forward-backward": 1,
    "gradient reduction": 1,
    "optimizer": 1,
    "data": 2,
    "forward": 2,
    "backward": 2,
    "communication": 2,
}
"""Phases, and the --timing-log-level from which on they are shown. communication: the time in which the rank was
blocked by the collectives of HAL's communicators."""
_COMPUTING = "computing"
"""The time of forward and backward passes and of the optimizer, without that in which collectives blocked the rank."""


class StepTimers:
    """Measures during `measuring`, which surrounds each step; `step` logs after it. Does nothing unless an option
    asks for it."""

    def __init__(self, config: Config, trainer: Trainer, report: RunLog | NullRunLog) -> None:
        self.config, self.trainer, self.report = config, trainer, report
        self.names = [name for name, level in LEVELS.items() if level <= config.timing_log_level]
        self.measures = bool(self.names) or config.log_straggler
        self._sums: dict[str, float] = {}
        self._steps, self._blocked_in_phase = 0, 0.0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Listens for phases and collectives within a `with` block."""
        if not self.measures:
            yield
            return
        with spans.listening(self._heard):
            yield

    def _heard(self, span: Span) -> None:
        sums = self._sums
        if span.kind == "phase":
            sums[span.name] = sums.get(span.name, 0.0) + span.seconds
            if span.name in ("forward", "backward", "optimizer"):
                sums[_COMPUTING] = sums.get(_COMPUTING, 0.0) + span.seconds - self._blocked_in_phase
            if span.name != "forward-backward":
                self._blocked_in_phase = 0.0
        elif span.kind == "communication" and span.facts["part"] != "start":
            sums["communication"] = sums.get("communication", 0.0) + span.seconds
            self._blocked_in_phase += span.seconds

    def step(self, result: StepResult) -> None:
        """Logs what is due after a step. All ranks call it."""
        c = self.config
        self._steps += 1
        if c.log_memory_to_tensorboard or (c.log_memory_interval and result.iteration % c.log_memory_interval == 0):
            self._memory(result.iteration)
        if result.iteration % c.log_interval and result.iteration != c.train_iters:
            return
        if self.measures:
            names = [*self.names, _COMPUTING]
            table = self._gather([self._sums.get(name, 0.0) / self._steps for name in names])
            self._log(result.iteration, dict(zip(names, table)))
        self._sums.clear()
        self._steps = 0

    def _gather(self, own: Sequence[float]) -> list[list[float]]:
        """For each value, those of all ranks."""
        world = self.trainer.world
        # In microseconds: not every device stores float64, and float32 would lose the digits of long times.
        values = torch.tensor([[round(1e6 * value) for value in own]], dtype=torch.int64, device=world.device)
        rows: list[list[int]] = world.all_gather(values).tolist()
        return [[row[i] * 1e-6 for row in rows] for i in range(len(own))]

    def _log(self, iteration: int, table: dict[str, list[float]]) -> None:
        computing = table.pop(_COMPUTING)
        if table:
            self.report.write_line(timing_lines(table, self.config.timing_log_option))
        if table and self.config.log_timers_to_tensorboard:
            self.report.scalars(iteration, {f"{name}-time": max(times) for name, times in table.items()})
        if self.config.log_straggler:
            self.report.write_line(straggler_line(computing, self.config.straggler_minmax_count))

    def _memory(self, iteration: int) -> None:
        stats = dict(hal.backend().memory_stats()) or {"peak-resident": peak_memory_bytes()}
        if self.config.log_memory_to_tensorboard:
            self.report.scalars(iteration, {f"mem-{name}-bytes": float(size) for name, size in stats.items()})
        if self.config.log_memory_interval and iteration % self.config.log_memory_interval == 0:
            shown = " | ".join(f"{name}: {size / 2**20:.1f}" for name, size in stats.items())
            self.report.write_line(f" [Rank 0] memory (MiB) | {shown}")


def timing_lines(table: dict[str, list[float]], option: str) -> str:
    """Megatron's lines about the seconds of each phase per rank. option: max, minmax or all."""
    heads = {"max": "max time", "minmax": "(min, max) time", "all": "times"}
    lines = [f"{heads[option]} across ranks (ms):"]
    for name, times in table.items():
        shown = {
            "max": f"{1e3 * max(times):.2f}",
            "minmax": f"({1e3 * min(times):.2f}, {1e3 * max(times):.2f})",
            "all": "",
        }[option]
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {shown}".rstrip())
        if option == "all":
            lines += [f"     rank {rank:2d}: {1e3 * seconds:.2f}" for rank, seconds in enumerate(times)]
    return "\n".join(lines)


def straggler_line(computing: Sequence[float], count: int) -> str:
    """Names the ranks that computed longest and shortest, with the ratio to the median over the ranks."""
    order = sorted(range(len(computing)), key=lambda rank: computing[rank])
    median = statistics.median(computing) or 1e-9

    def shown(ranks: Sequence[int]) -> str:
        return ", ".join(f"{rank} ({1e3 * computing[rank]:.1f} ms, {computing[rank] / median:.2f}x)" for rank in ranks)

    slow, fast = order[::-1][:count], order[:count]
    return (
        f" straggler: time per step in forward, backward and optimizer without waiting | median: {1e3 * median:.1f} ms "
        f"| slowest ranks: {shown(slow)} | fastest ranks: {shown(fast)} |"
    )
