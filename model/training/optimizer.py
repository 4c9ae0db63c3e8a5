"""AdamW on a model's parameters: Megatron's no-decay rule, clipping, float32 master weights, loss scaling.

Parameters are addressed by name, so that a checkpoint does not depend on their order. The arithmetic uses three ops of
HAL (unscale_and_check, l2norm, adamw), each of which processes all tensors in one call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hal
from hal import Comm, SingleRankComm, ops

from ..config.schema import Config
from ..gpt.model import GPT, OUTPUT_LAYER, WORD_EMBEDDING
from .loss_scaler import LossScaler

UNCORRECTED = 1 << 30
"""A number of a step in which the factors of the bias correction, 1 - beta**step, are 1."""

DECOUPLED = (WORD_EMBEDDING, OUTPUT_LAYER)
"""The parameters whose learning rate --decoupled-lr sets, as in Megatron."""


def no_decay(config: Config, name: str, parameter: Tensor) -> bool:
    """Megatron's rule: biases and 1-D parameters (the norms') are not decayed, but with --apply-wd-to-qk-layernorm the
    norms of queries and keys."""
    if config.apply_wd_to_qk_layernorm and (".q_layernorm." in name or ".k_layernorm." in name):
        return False
    return name.endswith(".bias") or parameter.ndim == 1


def local(x: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient, sharing memory with it: a shard, or the entire tensor."""
    x = x.detach()
    part: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return part


def owned_names(models: Sequence[GPT], at: Mapping[str, int], zero: int) -> set[str]:
    """Names of the parameters of `models` that the rank at the coordinates `at` owns; see Optimizer.

    A replicated parameter is owned by the first of its ranks, and a tied weight by the first stage. With `zero` > 0,
    fully_shard gives every replica a different part, which it owns. Parameters of experts have
    coordinates of their own in `at` ("edp").
    """

    def owned(model: GPT, name: str) -> bool:
        shard = model.shards.get(name)
        if shard is not None and shard.experts:
            return bool(zero) or at["edp"] == 0
        return (bool(zero) or at["dp"] == at["cp"] == 0) and (at["tp"] == 0 or shard is not None)

    return {
        name
        for model in models
        for name, _ in model.named_parameters()
        if model.stored_name(name) == name and owned(model, name)
    }


class Optimizer:
    """AdamW over this rank's named parameters of a model that is distributed over the ranks of `world`.

    Overflow and gradient norm are those of the entire model. `steps` counts the steps taken, without skipped ones. For
    a low-precision model, `main` holds float32 copies and gradients are summed over microbatches in float32; for a
    float32 model, `main` is the parameters themselves.
    """

    def __init__(
        self,
        config: Config,
        parameters: Mapping[str, nn.Parameter],
        world: Comm | None = None,
        owned: Collection[str] | None = None,
    ) -> None:
        """owned: names of the parameters that this rank adds to the gradient norm and writes to checkpoints, such that
        each element of the model is owned by exactly one rank. Default: all."""
        self.config, self.model, self.world = config, dict(parameters), world or SingleRankComm()
        self.owned = set(self.model if owned is None else owned)
        # Parameters sharded by fully_shard are float32; fully_shard casts them for the computation.
        self.low = any(p.dtype != torch.float32 for p in self.model.values())
        self.main = {n: local(p).float() if self.low else local(p) for n, p in self.model.items()}
        self.exp_avg = {n: torch.zeros_like(p) for n, p in self.main.items()}
        self.exp_avg_sq = {n: torch.zeros_like(p) for n, p in self.main.items()}
        decoupled = DECOUPLED if config.decoupled_lr is not None else ()
        # (names, whether they are decayed, whether their learning rate is --decoupled-lr)
        self.groups: list[tuple[list[str], bool, bool]] = [([], True, False), ([], False, False), ([], True, True)]
        for name, parameter in self.model.items():
            self.groups[2 if name in decoupled else int(no_decay(config, name, parameter))][0].append(name)
        self.scaler, self.steps = LossScaler.of(config), 0
        self.main_grads: dict[str, Tensor] = {}
        # The gradient of a single microbatch can stay in 16 bits, which saves a copy, because nothing is added to it.
        # It has to be converted to float32 if it is summed over ranks, and in fp16, where unscaling could underflow.
        self._keeps_rounded = self.world.size == 1 and not config.fp16
        if self.low:
            for name, parameter in self.model.items():
                hook = functools.partial(self._collect, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _collect(self, name: str, parameter: Tensor) -> None:
        """Moves a 16-bit gradient into the float32 sum of the previous microbatches."""
        grad, total = parameter.grad, self.main_grads.get(name)
        if grad is None:  # the layer has added it to the sum itself: see sum_in_place
            return
        if total is not None:
            self.main_grads[name] = total.float().add_(grad)
        else:
            self.main_grads[name] = grad if self._keeps_rounded else grad.float()
        parameter.grad = None

    def collect(self) -> None:
        """Collects 16-bit gradients that were computed without autograd's hooks, as in the zero-bubble schedule."""
        if self.low:
            for name, parameter in self.model.items():
                self._collect(name, parameter)

    def sum_in_place(self) -> None:
        """Sets the float32 gradient sums as `main_grad` of the parameters. In the remaining microbatches of the step
        the linear layers accumulate into these directly, instead of creating a gradient that is added afterwards."""
        if not hal.backend().impls.get(ops.linear_wgrad.name):
            return
        if self.low:
            for name in self.main_grads:  # one by one, so that only one gradient at a time exists in both dtypes
                self.main_grads[name] = self.main_grads[name].float()
        grouped = bool(hal.backend().impls.get(ops.grouped_linear_wgrad.name))
        for name, grad in self.grads().items():
            if grad.ndim < 3 or grouped:
                self.model[name].main_grad = grad  # type: ignore[attr-defined]

    def grads(self) -> dict[str, Tensor]:
        """This step's gradients by parameter name, where they exist: float32, or 16-bit (see _keeps_rounded)."""
        if self.low:
            return self.main_grads
        return {n: local(p.grad) for n, p in self.model.items() if p.grad is not None}

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self.main_grads.clear()
        for parameter in self.model.values():
            parameter.grad = parameter.main_grad = None  # type: ignore[attr-defined]

    def unscale(self) -> bool:
        """Divides the gradients by the loss scale; True if any of them, on any rank, is not finite."""
        overflow = ops.unscale_and_check(list(self.grads().values()), 1.0 / self.scaler.scale)
        return bool(self.world.all_reduce(overflow, "max").item())

    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the model together, a scalar on the device: float32, or float64 if it is made of
        several ranks' norms and the device stores float64."""
        owned = [grad for name, grad in self.grads().items() if name in self.owned]
        if self.world.size == 1:
            return ops.l2norm(owned)  # not summed as a square, which may overflow float32
        device = next(iter(self.main.values())).device
        norm = ops.l2norm(owned) if owned else torch.zeros((), device=device)
        return self._wide(self.world.all_reduce(norm * norm)).sqrt()

    def clip_factor(self, grad_norm: Tensor) -> Tensor:
        """The factor that clips gradients of this norm to `clip_grad`, a float32 scalar on the device. Computed in
        float64 where the device stores it, so that it is rounded once."""
        limit, norm = self.config.clip_grad, self._wide(grad_norm)
        return (limit / (norm + 1e-6)).clamp(max=1.0).float() if limit > 0.0 else torch.ones_like(norm).float()

    def _wide(self, scalar: Tensor) -> Tensor:
        return scalar.double() if torch.float64 in hal.backend().capabilities().dtypes else scalar

    def step(
        self,
        lr: float,
        clip_factor: Tensor | None = None,
        *,
        decoupled_lr: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        """One AdamW step. clip_factor: of the gradients, float32 scalar on the device; no update if it is not finite.
        decoupled_lr: of word embeddings and output layer, default lr; weight_decay: default the config's."""
        c, grads = self.config, self.grads()
        self.steps += 1
        decay = c.weight_decay if weight_decay is None else weight_decay
        eps = c.adam_eps
        if c.adam_eps_before_correction:
            # sqrt(v) + eps, divided by the root of the correction, is the root of the corrected v plus this.
            eps /= math.sqrt(1 - c.adam_beta2 ** (self.steps if c.adam_bias_correction else UNCORRECTED))
        for group, decayed, own in self.groups:
            names = [n for n in group if n in grads]
            if not names:
                continue
            ops.adamw(
                [self.main[n] for n in names],
                [grads[n] for n in names],
                [self.exp_avg[n] for n in names],
                [self.exp_avg_sq[n] for n in names],
                step=self.steps if c.adam_bias_correction else UNCORRECTED,
                lr=decoupled_lr if own and decoupled_lr is not None else lr,
                beta1=c.adam_beta1,
                beta2=c.adam_beta2,
                eps=eps,
                weight_decay=decay if decayed else 0.0,
                model_params=[local(self.model[n]) for n in names] if self.low else None,
                clip_factor=clip_factor,
            )
