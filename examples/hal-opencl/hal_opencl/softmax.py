"""scale_mask_softmax (kernels/softmax.cl). The mask is read through its strides, never expanded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.backend_tools import with_signature_of

from .device import OpenCL
from .memory import KernelCall, Out
from .tensors import refuses


def _run(name: str, x: Tensor, tensors: Sequence[object], mask: Tensor | None, scale: float, causal: bool) -> None:
    """Runs a kernel of softmax.cl, one group per row of x [b, n, sq, sk]; tensors: those it reads and writes."""
    if not x.numel():
        return
    rows = math.prod(x.shape[:3])
    strides = (0, 0, 0, 0) if mask is None else mask.expand(x.shape).stride()
    with KernelCall() as call:
        arguments = (*tensors, rows, mask, float(scale), *x.shape[1:], *strides)
        call.run("softmax", name, {"T": x.dtype, "CAUSAL": int(causal)}, (rows,), *arguments)


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    """dx [b, n, sq, sk] from dy of the same shape."""
    x, stats, mask, scale, causal = residuals
    dx = torch.empty_like(x)
    _run("softmax_bwd", x, (x, stats, dy.contiguous(), Out(dx)), mask, scale, causal)
    return (dx,)


@OpenCL.impl(ops.scale_mask_softmax, id="opencl/cl", why_not=refuses(ops.scale_mask_softmax), bwd=_backward)
@with_signature_of(ops.scale_mask_softmax)
def scale_mask_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    y, stats = torch.empty_like(x), torch.empty(2, math.prod(x.shape[:3]))
    _run("softmax_fwd", x, (x, Out(y), Out(stats)), mask, scale, causal)
    return y, (x, stats, mask, scale, causal)
