"""scale_mask_softmax (kernels/softmax.c). The mask is read through its strides, never expanded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import address, ops

from .build import lib_for
from .device import CpuRef
from .memory import empty_like
from .tensors import CODE, REAL, refuses


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    """dx [b, n, sq, sk] from dy of the same shape."""
    y, x, lse, scale, causal = residuals
    dy, dx = dy.contiguous(), empty_like(y)
    b, n, sq, sk = y.shape
    if y.numel():
        lib_for(y.dtype).hal_softmax_bwd(
            CODE[y.dtype],
            y.data_ptr() or address(y),
            address(x),
            address(lse),
            dy.data_ptr() or address(dy),
            dx.data_ptr() or address(dx),
            scale,
            causal,
            b * n * sq,
            sq,
            sk,
        )
    return (dx,)


@CpuRef.impl(ops.scale_mask_softmax, id="cpu_ref/c", why_not=refuses(ops.scale_mask_softmax), bwd=_backward)
def scale_mask_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    narrow = REAL[x.dtype] != x.dtype  # if so, the backward pass recomputes unrounded probabilities
    y, lse = empty_like(x), torch.empty(x.shape[:-1]) if narrow else None
    at, strides = 0, (0, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(x.shape)  # a view: broadcast dimensions get stride 0
        at, strides = mask.data_ptr() or address(mask), mask.stride()
    if x.numel():
        lib_for(x.dtype).hal_softmax_fwd(
            CODE[x.dtype],
            x.data_ptr() or address(x),
            y.data_ptr() or address(y),
            scale,
            causal,
            *x.shape,
            address(lse),
            at,
            *strides,
        )
    return y, (y, x if narrow else None, lse, scale, causal)
