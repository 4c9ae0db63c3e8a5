"""swiglu, geglu and bias_gelu (kernels/activation.cl). The backward pass recomputes the activation from x and bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.backend_tools import activations_from

from .device import OpenCL
from .engine import CHUNK
from .memory import KernelCall, Out
from .tensors import column_sum, pieces, refuses, rows_of, spans

_KIND = {"silu": 0, "none": 1, "tanh": 2, "fast": 3}


def _forward(x: Tensor, bias: Tensor | None, kind: str, gated: bool) -> tuple[Tensor, tuple[Any, ...]]:
    """y [..., h] and residuals, for x [..., h] or, gated, [..., 2h]; bias has the length of the rows of x."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype)
    types = {"T": x.dtype, "KIND": _KIND[kind], "GATED": int(gated)}
    if y.numel():
        with KernelCall() as call:
            grid = (-(-width // CHUNK), rows_of(x))
            call.run("activation", "activation_fwd", types, grid, x, bias, Out(y), width)
    return y, (x, bias, types)


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx like x, and dbias (None without a bias), from dy [..., h]."""
    x, bias, types = residuals
    rows, width, dy = rows_of(x), dy.shape[-1], dy.contiguous()
    dx, db = torch.empty_like(x), None if bias is None else torch.zeros_like(bias)
    if x.numel():
        count = pieces(rows)
        with KernelCall() as call:
            partial = None if db is None else call.scratch(count * x.shape[-1])
            grid = spans(rows, width)
            call.run("activation", "activation_bwd", types, grid, x, bias, dy, Out(dx), partial, rows, width)
            if db is not None:
                column_sum(call, partial, count, db)
    return dx, db


swiglu, geglu, bias_gelu = activations_from(_forward)
OpenCL.impl(ops.swiglu, id="opencl/cl", why_not=refuses(ops.swiglu), bwd=_backward)(swiglu)
OpenCL.impl(ops.geglu, id="opencl/cl", why_not=refuses(ops.geglu), bwd=_backward)(geglu)
OpenCL.impl(ops.bias_gelu, id="opencl/cl", why_not=refuses(ops.bias_gelu), bwd=_backward)(bias_gelu)
