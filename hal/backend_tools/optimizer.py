"""The arguments of ops.adamw in the form that kernels take, for `with_signature_of`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hal.core.call import Call
from hal.core.host_values import host_value

AdamWMember = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""param, grad, exp_avg, exp_avg_sq, and the low-precision copy that receives the new values, if any."""


class AdamWScalars(NamedTuple):
    """The plain values of a step, and the factors of the formula that follow from them."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float

    @property
    def skipped(self) -> bool:
        """Whether nothing is written, because the clip factor is not finite (`adamw_members` is then empty)."""
        return not math.isfinite(self.grad_scale)

    @property
    def decay(self) -> float:
        """The factor of a parameter before its update."""
        return 1.0 - self.lr * self.weight_decay

    @property
    def corrections(self) -> tuple[float, float]:
        """The bias corrections: the divisors of the first and of the second moment."""
        return 1.0 - self.beta1**self.step, 1.0 - self.beta2**self.step


def adamw_scalars(call: Call, *, read: bool = True) -> AdamWScalars:
    """The values of a call of ops.adamw.

    read: whether clip_factor is read from the device and multiplied with grad_scale. Reading waits for the device, once
        for all calls with the same tensor; a kernel that takes clip_factor itself passes False.
    """
    grad_scale = call.grad_scale * (_read_clip_factor(call) if read else 1.0)
    return AdamWScalars(call.step, call.lr, call.beta1, call.beta2, call.eps, call.weight_decay, grad_scale)


def adamw_members(call: Call, *, read: bool = True) -> list[AdamWMember]:
    """The tensors of a call of ops.adamw, by parameter; none if clip_factor is not finite (read: see
    `adamw_scalars`)."""
    if read and not math.isfinite(_read_clip_factor(call)):
        return []
    copies: Sequence[Tensor | None] = [None] * len(call.params) if call.model_params is None else call.model_params
    return list(zip(call.params, call.grads, call.exp_avgs, call.exp_avg_sqs, copies))


def _read_clip_factor(call: Call) -> float:
    return 1.0 if call.clip_factor is None else float(host_value(call.clip_factor))


def adamw_groups(members: Iterable[AdamWMember]) -> dict[tuple[torch.dtype, torch.dtype], list[AdamWMember]]:
    """Groups members by (gradient dtype, copy dtype), for which kernels are compiled (float32 if there is no copy)."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[AdamWMember]] = {}
    for member in members:
        grad, copy = member[1], member[4]
        groups.setdefault((grad.dtype, torch.float32 if copy is None else copy.dtype), []).append(member)
    return groups


def adamw_written(call: Call) -> list[Tensor]:
    """All tensors that a call of ops.adamw writes."""
    return [*call.params, *call.exp_avgs, *call.exp_avg_sqs, *(call.model_params or ())]


def in_place_reasons(written: Iterable[Tensor]) -> Sequence[str]:
    """Reasons why a kernel that takes addresses cannot update these tensors in place: they must be contiguous."""
    if all(t.is_contiguous() for t in written):
        return ()
    return ["a parameter, moment or model copy that is not contiguous (it is updated in place)"]
