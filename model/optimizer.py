"""AdamW on a model's parameters: Megatron's no-decay rule, clipping, float32 master weights, loss scaling.

Parameters are addressed by name, so that a checkpoint does not depend on their order. The arithmetic is three ops of
HAL (unscale_and_check, l2norm, adamw), each over all tensors in one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hal
from hal import ops

from .config import Config


def no_decay(name: str, parameter: Tensor) -> bool:
    """Megatron's rule: biases and 1-D parameters (the norms') are not decayed."""
    return name.endswith(".bias") or parameter.ndim == 1


def local(x: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient, sharing memory with it: a shard, or all of it."""
    return x.detach().to_local() if isinstance(x, DTensor) else x.detach()


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
        """The scaler that a config asks for."""
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
        """Continues where a run's scaler stood, under this run's options. A constant scale is an option."""
        if self.dynamic and stored.dynamic:
            self.scale = max(stored.scale, self.minimum)
            self.good_steps, self.hysteresis_left = stored.good_steps, stored.hysteresis_left

    def update(self, overflow: bool) -> None:
        """Counts a step and changes the scale if it is time."""
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


class Optimizer:
    """AdamW over named parameters. `steps` counts the steps taken (skipped ones do not count).

    For a low-precision model, `main` holds float32 copies and gradients are summed over microbatches in float32;
    for a float32 model, `main` is the parameters themselves.
    """

    keeps_rounded = True
    """Whether a gradient that nothing was added to may stay in 16 bits: it has no more digits, and is copied less."""

    def __init__(self, config: Config, parameters: Mapping[str, nn.Parameter]) -> None:
        self.config, self.model = config, dict(parameters)
        # Parameters sharded by fully_shard are the float32 ones; it casts them itself.
        self.low = any(p.dtype != torch.float32 for p in self.model.values())
        self.main = {n: local(p).float() if self.low else local(p) for n, p in self.model.items()}
        self.exp_avg = {n: torch.zeros_like(p) for n, p in self.main.items()}
        self.exp_avg_sq = {n: torch.zeros_like(p) for n, p in self.main.items()}
        self.groups = [
            ([n for n, p in self.model.items() if not no_decay(n, p)], config.weight_decay),
            ([n for n, p in self.model.items() if no_decay(n, p)], 0.0),
        ]
        self.scaler, self.steps = LossScaler.of(config), 0
        self.main_grads: dict[str, Tensor] = {}
        if self.low:
            for name, parameter in self.model.items():
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._collect(name, p))

    def _collect(self, name: str, parameter: Tensor) -> None:
        grad, held = parameter.grad, self.main_grads.get(name)
        if grad is None:  # it has been added to the sum
            return
        if held is not None:
            self.main_grads[name] = held.float().add_(grad)
        else:
            # Unscaling would round once more, and in fp16 underflow.
            self.main_grads[name] = grad if self.keeps_rounded and not self.config.fp16 else grad.float()
        parameter.grad = None

    def sum_in_place(self) -> None:
        """Lets the backward passes that follow in this step add to the gradients so far, which parameters then have as
        `main_grad` (float32; layers.linear adds its products to it), instead of making tensors that are added."""
        if not hal.backend().impls.get(ops.linear_wgrad.name):
            return
        if self.low:
            for name in self.main_grads:  # one by one: all of both kinds at once would be a peak of memory
                self.main_grads[name] = self.main_grads[name].float()
        for name, grad in self.grads().items():
            self.model[name].main_grad = grad  # type: ignore[attr-defined]

    def grads(self) -> dict[str, Tensor]:
        """This step's gradients of parameters that have one, float32 unless `keeps_rounded`."""
        if self.low:
            return self.main_grads
        return {n: local(p.grad) for n, p in self.model.items() if p.grad is not None}

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self.main_grads.clear()
        for parameter in self.model.values():
            parameter.grad = parameter.main_grad = None  # type: ignore[attr-defined]

    def unscale(self) -> bool:
        """Divides the gradients by the loss scale; True if any of them is not finite."""
        return bool(ops.unscale_and_check(list(self.grads().values()), 1.0 / self.scaler.scale).item())

    def grad_norm(self) -> float:
        """The norm of all gradients together."""
        return ops.l2norm(list(self.grads().values())).item()

    def step(self, lr: float, grad_norm: float) -> None:
        """One AdamW step with the gradients clipped to `clip_grad`."""
        c, grads = self.config, self.grads()
        self.steps += 1
        clip = min(1.0, c.clip_grad / (grad_norm + 1e-6)) if c.clip_grad > 0.0 else 1.0
        for names, decay in self.groups:
            names = [n for n in names if n in grads]
            ops.adamw(
                [self.main[n] for n in names],
                [grads[n] for n in names],
                [self.exp_avg[n] for n in names],
                [self.exp_avg_sq[n] for n in names],
                step=self.steps,
                lr=lr,
                beta1=c.adam_beta1,
                beta2=c.adam_beta2,
                eps=c.adam_eps,
                weight_decay=decay,
                grad_scale=clip,
                model_params=[local(self.model[n]) for n in names] if self.low else None,
            )
