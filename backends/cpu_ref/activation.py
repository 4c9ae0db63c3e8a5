"""swiglu, geglu and bias_gelu (kernels/activation.c). The backward pass recomputes the activation from x and bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import address, ops
from hal.backend_tools import activations_from, rows_of

from .build import lib_for
from .device import CpuRef
from .memory import empty, empty_like
from .tensors import CODE, REAL, addresses, parameter, refuses

_KIND = {"silu": 0, "none": 1, "tanh": 2, "fast": 3}


def _forward(x: Tensor, bias: Tensor | None, kind: str, gated: bool) -> tuple[Tensor, tuple[Any, ...]]:
    """y [..., h] and residuals, for x [..., h] or, gated, [..., 2h]; bias has the length of the rows of x."""
    x, code = x.contiguous(), _KIND[kind]
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    b = None if bias is None else parameter(bias, REAL[x.dtype])
    y = empty((*x.shape[:-1], width), x.dtype)
    lib_for(x.dtype).hal_activation_fwd(
        CODE[x.dtype],
        code,
        gated,
        x.data_ptr() or address(x),
        address(b),
        y.data_ptr() or address(y),
        rows_of(x),
        width,
    )
    return y, (x, bias, code, gated)


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx like x, and dbias (None without a bias), from dy [..., h]."""
    x, bias, code, gated = residuals
    dy, real = dy.contiguous(), REAL[x.dtype]
    dx, b, db = empty_like(x), None, None
    if bias is not None:
        b, db = parameter(bias, real), torch.empty(bias.shape, dtype=real)
    lib_for(x.dtype).hal_activation_bwd(
        CODE[x.dtype],
        code,
        gated,
        *addresses(x, b, dy, dx, db),
        rows_of(x),
        dy.shape[-1],
    )
    return dx, None if db is None else db.to(bias.dtype)


swiglu, geglu, bias_gelu = activations_from(_forward)
CpuRef.impl(ops.swiglu, id="cpu_ref/c", why_not=refuses(ops.swiglu), bwd=_backward)(swiglu)
CpuRef.impl(ops.geglu, id="cpu_ref/c", why_not=refuses(ops.geglu), bwd=_backward)(geglu)
CpuRef.impl(ops.bias_gelu, id="cpu_ref/c", why_not=refuses(ops.bias_gelu), bwd=_backward)(bias_gelu)
