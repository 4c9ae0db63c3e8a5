"""swiglu, geglu and bias_gelu (kernels/activation.c). The backward pass recomputes the activation from x and bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal import address, ops

from .build import lib
from .device import CpuRef
from .memory import empty, empty_like
from .tensors import CODE, REAL, parameter, reasons, rows_of

_SILU, _GELU = 0, {"none": 1, "tanh": 2, "fast": 3}


def _forward(x: Tensor, bias: Tensor | None, kind: int, gated: bool) -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    b = None if bias is None else parameter(bias, REAL[x.dtype])
    y = empty((*x.shape[:-1], width), x.dtype)
    lib().hal_activation_fwd(
        CODE[x.dtype],
        kind,
        gated,
        x.data_ptr() or address(x),
        address(b),
        y.data_ptr() or address(y),
        rows_of(x),
        width,
    )
    return y, (x, bias, kind, gated)


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias, kind, gated = residuals
    dy, real = dy.contiguous(), REAL[x.dtype]
    dx, b, db = empty_like(x), None, None
    if bias is not None:
        b, db = parameter(bias, real), torch.empty(bias.shape, dtype=real)
    lib().hal_activation_bwd(
        CODE[x.dtype],
        kind,
        gated,
        x.data_ptr() or address(x),
        address(b),
        dy.data_ptr() or address(dy),
        dx.data_ptr() or address(dx),
        address(db),
        rows_of(x),
        dy.shape[-1],
    )
    return dx, None if db is None else db.to(bias.dtype)


@hal.by_metadata
def _why_not(x: Tensor, bias: Tensor | None = None) -> Sequence[str]:
    return reasons(x, bias)


@hal.by_metadata
def _why_not_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> Sequence[str]:
    return reasons(x, bias)


@CpuRef.impl(ops.swiglu, id="cpu_ref/c", why_not=_why_not, bwd=_backward)
def swiglu(x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, bias, _SILU, True)


@CpuRef.impl(ops.geglu, id="cpu_ref/c", why_not=_why_not_gelu, bwd=_backward)
def geglu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, bias, _GELU[approximate], True)


@CpuRef.impl(ops.bias_gelu, id="cpu_ref/c", why_not=_why_not_gelu, bwd=_backward)
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, bias, _GELU[approximate], False)
