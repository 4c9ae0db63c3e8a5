"""The loss scale of fp16 training: constant, or adapted to the overflows that it causes."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.schema import Config


@dataclass
class LossScaler:
    """The factor that keeps fp16 gradients out of underflow; 1 without fp16.

    Dynamic: halves after `hysteresis` overflows, doubles after `window` steps without one (Micikevicius et al., "Mixed
    precision training", arXiv 1710.03740; hysteresis as in Megatron).
    """

    scale: float = 1.0
    dynamic: bool = False
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    hysteresis_left: int = 2

    @staticmethod
    def of(config: Config) -> LossScaler:
        """The scaler of a config."""
        if not config.fp16:
            return LossScaler()
        if config.loss_scale is not None:
            return LossScaler(config.loss_scale)
        return LossScaler(
            config.initial_loss_scale,
            True,
            config.min_loss_scale,
            config.loss_scale_window,
            config.hysteresis,
            0,
            config.hysteresis,
        )

    def resume(self, stored: LossScaler) -> None:
        """Continues from a checkpoint's scaler under this run's options. A constant scale is an option."""
        if self.dynamic and stored.dynamic:
            self.scale = max(stored.scale, self.minimum)
            self.good_steps, self.hysteresis_left = stored.good_steps, stored.hysteresis_left

    def update(self, overflow: bool) -> None:
        """Counts a step, and changes the scale if a threshold is reached."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps, self.hysteresis_left = 0, self.hysteresis_left - 1
            if self.hysteresis_left <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.scale, self.good_steps, self.hysteresis_left = self.scale * 2.0, 0, self.hysteresis
