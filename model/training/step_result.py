"""What a step gave: on the device while it may still be computed, and read by the host for several steps at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import hal
from hal import HalError

from .expert_load import ExpertLoad, ExpertReport
from .rerun import Gradients


class TrainingFailed(HalError):
    """The run cannot continue because the loss or the gradients are not finite."""


@dataclass(frozen=True)
class StepResult:
    """The result of one iteration; `consumed` counts all samples so far, grad_norm is None for a skipped step (fp16
    overflow), seconds is its wall time (of steps that were read together, their mean), batch_size its number of
    samples, experts what the routers counted."""

    iteration: int
    consumed: int
    loss: float
    grad_norm: float | None
    lr: float
    loss_scale: float
    skipped: bool
    seconds: float
    batch_size: int
    experts: ExpertReport | None = None


class DeviceGradients(NamedTuple):
    """`Gradients` as scalars on the device; the loss is float32, the norm float32 or float64."""

    loss: Tensor
    norm: Tensor | None

    def read(self) -> Gradients:
        """Waits for the device."""
        with hal.device_errors():
            return Gradients(float(self.loss), None if self.norm is None else float(self.norm))

    def numbers(self) -> Tensor:
        """Loss and norm, float32 [2]; the norm is NaN if there is none."""
        norm = torch.full_like(self.loss, math.nan) if self.norm is None else self.norm
        return torch.stack([self.loss, norm.float()])


class Progress(NamedTuple):
    """The counters of a run: iterations, samples, samples that the schedules count, and steps of the optimizer."""

    iteration: int
    consumed: int
    scheduled: int
    steps: int


class PendingStep(NamedTuple):
    """A step whose results have not been read. numbers: float32 [2 + n], loss, norm and the counts of the experts."""

    before: Progress
    numbers: Tensor
    lr: float
    loss_scale: float
    skipped: bool
    batch_size: int


class PendingSteps:
    """The steps whose results are on the device, and whether one of them has failed.

    A step fails if its loss or gradient norm is not finite. Then `guard` keeps it and all later ones from changing the
    model, until `read` has raised.
    """

    def __init__(self, device: torch.device, experts: ExpertLoad) -> None:
        self._steps: list[PendingStep] = []
        self._experts, self._began = experts, 0.0
        self._failed = torch.zeros((), device=device)

    def begin(self) -> None:
        """Called at the beginning of a step; the time counts from the first one since the last `read`."""
        if not self._steps:
            self._began = time.perf_counter()

    def guard(self, loss: Tensor, norm: Tensor) -> Tensor:
        """0, or NaN if this step or an earlier one has failed; a scalar that is added to the clip factor."""
        # 0 x is NaN if and only if x is not finite, and a sum with a NaN stays one.
        self._failed += 0.0 * loss + 0.0 * norm
        return self._failed

    def add(self, step: PendingStep) -> None:
        """Called at the end of a step."""
        self._steps.append(step)

    def read(self, undo: Callable[[Progress], None]) -> Iterator[StepResult]:
        """The results since the last call, for which the host waits once. In the place of a step that failed, calls
        `undo` with the progress before it, and raises TrainingFailed."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        with hal.device_errors():
            rows = torch.stack([step.numbers for step in steps]).cpu().tolist()
        seconds = (time.perf_counter() - self._began) / len(steps)
        for step, (loss, norm, *counts) in zip(steps, rows):
            iteration, consumed = step.before.iteration + 1, step.before.consumed
            if not (step.skipped or (math.isfinite(loss) and math.isfinite(norm))):
                self._failed.zero_()
                undo(step.before)
                raise TrainingFailed(
                    f"iteration {iteration}: the loss is {loss} and the gradient norm {norm}; nothing was updated. "
                    f"Lower --lr, lengthen --lr-warmup-iters, or look at the data around sample {consumed}"
                )
            yield StepResult(
                iteration,
                consumed + step.batch_size,
                loss,
                None if step.skipped else norm,
                step.lr,
                step.loss_scale,
                step.skipped,
                seconds,
                step.batch_size,
                self._experts.report(counts),
            )
