"""adamw, l2norm and unscale_and_check (kernels/optimizer.c): one kernel call per dtype, for all tensors of the list."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hal import address, ops

from .build import lib
from .device import CpuRef
from .tensors import CODE, reasons


def _addresses(tensors: Iterable[Tensor]) -> array[int]:
    return array("Q", [t.data_ptr() or address(t) for t in tensors])


def _sizes(tensors: Iterable[Tensor]) -> array[int]:
    return array("q", [t.numel() for t in tensors])


def _at(values: array[int]) -> int:
    return values.buffer_info()[0]


def _why_not_adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    model_params: Sequence[Tensor] | None = None,
) -> Sequence[str]:
    copies = model_params if model_params is not None else ()
    written = [*params, *exp_avgs, *exp_avg_sqs, *copies]
    if not all(t.is_contiguous() for t in written):
        return ["a parameter, moment or model copy that is not contiguous (it is updated in place)"]
    if any(g.dtype == torch.float64 for g in grads) or any(m.dtype == torch.float64 for m in copies):
        return ["float64 grads or model_params (the update is float32)"]
    return reasons(*written, *grads)


@CpuRef.impl(ops.adamw, id="cpu_ref/c", why_not=_why_not_adamw)
def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    model_params: Sequence[Tensor] | None = None,
) -> None:
    grads = [g.contiguous() for g in grads]
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, g in enumerate(grads):
        kinds.setdefault((g.dtype, torch.float32 if model_params is None else model_params[i].dtype), []).append(i)
    for (grad_dtype, model_dtype), members in kinds.items():
        sizes = _sizes(params[i] for i in members)
        lists = [_addresses(ts[i] for i in members) for ts in (params, grads, exp_avgs, exp_avg_sqs)]
        models = None if model_params is None else _addresses(model_params[i] for i in members)
        lib().hal_adamw(
            CODE[grad_dtype],
            CODE[model_dtype],
            len(members),
            _at(sizes),
            *map(_at, lists),
            0 if models is None else _at(models),
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
            1.0 - beta1**step,
            1.0 - beta2**step,
            grad_scale,
        )


def _by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    return groups


def _why_not_l2norm(tensors: Sequence[Tensor]) -> Sequence[str]:
    return reasons(*tensors)


@CpuRef.impl(ops.l2norm, id="cpu_ref/c", why_not=_why_not_l2norm)
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    total = 0.0
    for dtype, group in _by_dtype(tensors).items():
        dense = [t.contiguous() for t in group]
        sizes, addresses = _sizes(dense), _addresses(dense)
        total += lib().hal_sum_of_squares(CODE[dtype], len(dense), _at(sizes), _at(addresses))
    return torch.tensor(math.sqrt(total), dtype=torch.float32)


def _why_not_unscale(grads: Sequence[Tensor], inv_scale: float) -> Sequence[str]:
    return reasons(*grads)


@CpuRef.impl(ops.unscale_and_check, id="cpu_ref/c", why_not=_why_not_unscale)
def unscale_and_check(grads: Sequence[Tensor], inv_scale: float) -> Tensor:
    found = False
    for dtype, group in _by_dtype(grads).items():
        dense = [g.contiguous() for g in group]
        sizes, addresses = _sizes(dense), _addresses(dense)
        found |= bool(lib().hal_unscale(CODE[dtype], len(dense), _at(sizes), _at(addresses), inv_scale))
        for g, copy in zip(group, dense):
            if not g.is_contiguous():  # the result of a copy goes back to where it came from
                g.copy_(copy)
    return torch.tensor(float(found), dtype=torch.float32)
