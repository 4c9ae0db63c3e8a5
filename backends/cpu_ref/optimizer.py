"""adamw, l2norm and unscale_and_check (kernels/optimizer.c): one kernel call per dtype for all tensors of a list."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from hal import Call, address, backend_tools, ops
from hal.backend_tools import AdamWMember, AdamWScalars, with_signature_of

from .build import lib
from .device import CpuRef
from .tensors import CODE, reasons

_refuses = partial(backend_tools.why_not_tensors, reasons=reasons)


def _addresses(tensors: Iterable[Tensor]) -> array[int]:
    """The addresses of the tensors as a C array."""
    return array("Q", [t.data_ptr() or address(t) for t in tensors])


def _sizes(tensors: Iterable[Tensor]) -> array[int]:
    """The element counts of the tensors as a C array."""
    return array("q", [t.numel() for t in tensors])


def _at(values: array[int]) -> int:
    """The address of the C array."""
    return values.buffer_info()[0]


def _why_not_adamw(call: Call) -> Sequence[str]:
    written = backend_tools.adamw_written(call)
    if gaps := backend_tools.in_place_reasons(written):
        return gaps
    if any(t.dtype == torch.float64 for t in (*call.grads, *(call.model_params or ()))):
        return ["float64 grads or model_params (the update is float32)"]
    return reasons(*written, *call.grads)


@CpuRef.impl(ops.adamw, id="cpu_ref/c", why_not=_why_not_adamw)
@with_signature_of(ops.adamw, members=backend_tools.adamw_members, scalars=backend_tools.adamw_scalars)
def adamw(members: Sequence[AdamWMember], scalars: AdamWScalars) -> None:
    for (grad_dtype, copy_dtype), group in backend_tools.adamw_groups(members).items():
        params, grads, exp_avgs, exp_avg_sqs, copies = zip(*group)
        dense = [g.contiguous() for g in grads]
        lists = [_addresses(tensors) for tensors in (params, dense, exp_avgs, exp_avg_sqs)]
        sizes, copied = _sizes(params), None if copies[0] is None else _addresses(copies)
        lib().hal_adamw(
            CODE[grad_dtype],
            CODE[copy_dtype],
            len(group),
            _at(sizes),
            *map(_at, lists),
            0 if copied is None else _at(copied),
            scalars.lr,
            scalars.beta1,
            scalars.beta2,
            scalars.eps,
            scalars.weight_decay,
            *scalars.corrections,
            scalars.grad_scale,
        )


@CpuRef.impl(ops.l2norm, id="cpu_ref/c", why_not=_refuses(ops.l2norm, "tensors"))
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    # Python floats are doubles, so the sums of the dtypes are added with the precision of the kernel.
    total = 0.0
    for dtype, group in backend_tools.by_dtype(tensors).items():
        dense = [t.contiguous() for t in group]
        sizes, addresses = _sizes(dense), _addresses(dense)
        total += lib().hal_sum_of_squares(CODE[dtype], len(dense), _at(sizes), _at(addresses))
    return torch.tensor(math.sqrt(total), dtype=torch.float32)


@CpuRef.impl(ops.unscale_and_check, id="cpu_ref/c", why_not=_refuses(ops.unscale_and_check, "grads"))
def unscale_and_check(grads: Sequence[Tensor], inv_scale: float) -> Tensor:
    # One flag for all dtypes is enough, because the loss scaler only has to know whether to skip the step.
    bad = False
    for dtype, group in backend_tools.by_dtype(grads).items():
        dense = [g.contiguous() for g in group]
        sizes, addresses = _sizes(dense), _addresses(dense)
        bad |= bool(lib().hal_unscale(CODE[dtype], len(dense), _at(sizes), _at(addresses), inv_scale))
        backend_tools.copy_back(group, dense)
    return torch.tensor(float(bad), dtype=torch.float32)
