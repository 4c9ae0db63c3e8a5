"""The learning rate and the weight decay as functions of the progress of training.

The formulas are Megatron's (OptimizerParamScheduler): warm-up, then one of five decays. Progress is counted in
sequences of successful steps, so that it does not depend on the growth of the batch. With warm-up the first step has
the rate `lr_warmup_init`, as in Megatron.

DeepSpeed's (lr_schedules.py since 0.16) are one step behind, except for the decay of its WarmupCosineLR: its engine
sets the rate of the first step when it makes the schedule, and counts from 0 after this step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config.sample_schedule import learning_rate_samples, total_samples
from ..config.schema import Config


@dataclass(frozen=True)
class LRScheduler:
    """lr(step) for step = 0, 1, ... (sequences, or another unit, before the step). warmup, decay, wsd_decay: lengths in
    that unit."""

    peak: float
    final: float
    style: str
    warmup: float
    decay: int
    initial: float = 0.0
    wsd_style: str = "exponential"
    wsd_decay: int = 0
    warmup_style: str = "linear"
    step_size: int = 1
    """Units per step, by which DeepSpeed's schedules are behind."""

    @staticmethod
    def of(config: Config, *, decoupled: bool = False) -> LRScheduler:
        """The schedule of a config. decoupled: that of word embeddings and output layer (--decoupled-lr)."""
        peak, final = config.lr, config.min_lr
        if decoupled and config.decoupled_lr is not None:
            peak = config.decoupled_lr
            final = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
        warmup, decay, wsd = learning_rate_samples(config)
        if warmup > 0 and config.lr_warmup_style != "linear":
            warmup = max(warmup, 2 * config.global_batch_size)  # DeepSpeed makes at least two steps of it
        return LRScheduler(
            peak,
            final,
            config.lr_decay_style,
            warmup,
            decay,
            config.lr_warmup_init,
            config.lr_wsd_decay_style,
            wsd,
            config.lr_warmup_style,
            config.global_batch_size,
        )

    def lr(self, step: int) -> float:
        """The learning rate of the step that follows `step` steps."""
        behind = self.step_size if self.warmup > 0 and self.warmup_style != "linear" else 0
        if self.warmup > 0 and step <= self.warmup:
            if behind and step < behind and self.style == "cosine":
                return 0.0  # WarmupCosineLR's first step, whatever its warmup_min_ratio
            return self.initial + (self.peak - self.initial) * self._risen(max(0, step - behind))
        if self.style == "constant":
            return self.peak
        step -= behind if self.style == "linear" else 0
        if step > self.decay:
            return self.final
        if self.style == "inverse-square-root":
            return max(self.final, self.peak * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(step, 1)))
        return self.final + (self.peak - self.final) * self._remaining(step)

    def _risen(self, step: int) -> float:
        """The fraction of the warm-up's rise after `step`."""
        if self.warmup_style == "deepspeed_log":
            return math.log1p(step / self.step_size) / math.log(self.warmup / self.step_size)
        return step / self.warmup

    def _remaining(self, step: int) -> float:
        """The remaining fraction of (peak - final), which falls from 1 to 0."""
        done = (step - self.warmup) / (self.decay - self.warmup)
        if self.style == "linear":
            return 1.0 - done
        if self.style == "cosine":
            return 0.5 * (math.cos(math.pi * done) + 1.0)
        start = self.decay - self.wsd_decay
        if step <= start:
            return 1.0
        done = (step - start) / self.wsd_decay
        remaining: dict[str, float] = {
            "linear": 1.0 - done,
            "cosine": 0.5 * (math.cos(math.pi * done) + 1.0),
            # Exponential decay from 2 to 1, shifted down by 1 so that it ends at 0.
            "exponential": 2.0 * 0.5**done - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(done),
        }
        return remaining[self.wsd_style]


def weight_decay(config: Config, samples: int) -> float:
    """The weight decay of the step that follows `samples` sequences: constant, or a ramp over the whole run."""
    start, end = config.start_weight_decay, config.end_weight_decay
    if config.weight_decay_incr_style == "constant" or start is None or end is None:
        return config.weight_decay
    done = min(1.0, samples / total_samples(config))
    if config.weight_decay_incr_style == "cosine":
        done = 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0)
    return start + (end - start) * done
