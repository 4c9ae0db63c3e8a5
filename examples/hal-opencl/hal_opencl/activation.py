"""swiglu, geglu and bias_gelu (kernels/activation.cl). The backward pass recomputes the activation from x and bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import ops

from .device import OpenCL
from .engine import CHUNK
from .memory import Call, Out
from .tensors import column_sum, pieces, reasons, rows_of, spans

_SILU, _GELU = 0, {"none": 1, "tanh": 2, "fast": 3}


def _forward(x: Tensor, bias: Tensor | None, kind: int, gated: bool) -> tuple[Tensor, tuple[Any, ...]]:
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype)
    types = {"T": x.dtype, "KIND": kind, "GATED": int(gated)}
    if y.numel():
        with Call() as call:
            grid = (-(-width // CHUNK), rows_of(x))
            call.run("activation", "activation_fwd", types, grid, x, bias, Out(y), width)
    return y, (x, bias, types)


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias, types = residuals
    rows, width, dy = rows_of(x), dy.shape[-1], dy.contiguous()
    dx, db = torch.empty_like(x), None if bias is None else torch.zeros_like(bias)
    if x.numel():
        count = pieces(rows)
        with Call() as call:
            partial = None if db is None else call.scratch(count * x.shape[-1])
            grid = spans(rows, width)
            call.run("activation", "activation_bwd", types, grid, x, bias, dy, Out(dx), partial, rows, width)
            if db is not None:
                column_sum(call, partial, count, db)
    return dx, db


def _why_not(x: Tensor, bias: Tensor | None = None) -> Sequence[str]:
    return reasons(x, bias)


def _why_not_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> Sequence[str]:
    return reasons(x, bias)


@OpenCL.impl(ops.swiglu, id="opencl/cl", why_not=_why_not, bwd=_backward)
def swiglu(x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, bias, _SILU, True)


@OpenCL.impl(ops.geglu, id="opencl/cl", why_not=_why_not_gelu, bwd=_backward)
def geglu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, bias, _GELU[approximate], True)


@OpenCL.impl(ops.bias_gelu, id="opencl/cl", why_not=_why_not_gelu, bwd=_backward)
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, bias, _GELU[approximate], False)
