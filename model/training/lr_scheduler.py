"""The learning rate as a function of the number of optimizer steps taken: warm-up, then one of five decays.

The formulas are Megatron's (OptimizerParamScheduler), counted in steps. With warm-up the first step has the rate
`lr_warmup_init`, as in Megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config.schema import Config


@dataclass(frozen=True)
class LRScheduler:
    """lr(step) for step = 0, 1, ... (optimizer steps taken before). warmup, decay, wsd_decay: numbers of steps."""

    peak: float
    final: float
    style: str
    warmup: int
    decay: int
    initial: float = 0.0
    wsd_style: str = "exponential"
    wsd_decay: int = 0

    @staticmethod
    def of(config: Config) -> LRScheduler:
        """The schedule of a config."""
        assert config.lr_decay_iters is not None
        return LRScheduler(
            config.lr,
            config.min_lr,
            config.lr_decay_style,
            config.lr_warmup_iters,
            config.lr_decay_iters,
            config.lr_warmup_init,
            config.lr_wsd_decay_style,
            config.lr_wsd_decay_iters or 0,
        )

    def lr(self, step: int) -> float:
        """The learning rate of the step that follows `step` steps."""
        if self.warmup > 0 and step <= self.warmup:
            return self.initial + (self.peak - self.initial) * step / self.warmup
        if self.style == "constant":
            return self.peak
        if step > self.decay:
            return self.final
        if self.style == "inverse-square-root":
            return max(self.final, self.peak * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(step, 1)))
        return self.final + (self.peak - self.final) * self._remaining(step)

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
