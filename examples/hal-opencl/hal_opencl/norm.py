"""layer_norm and rms_norm (kernels/norm.cl). The rows' statistics are saved for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ops

from .device import OpenCL
from .memory import KernelCall, Out
from .tensors import column_sum, pieces, refuses, rows_of, spans


def _types(x: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Any]:
    """The -D options of norm.cl; without a bias it is an RMS norm."""
    return {
        "T": x.dtype,
        "W": weight.dtype,
        "B": weight.dtype if bias is None else bias.dtype,
        "CENTRED": int(bias is not None),
    }


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y, and the statistics [1 or 2, rows]. x is contiguous."""
    rows = rows_of(x)
    y, stats = torch.empty_like(x), torch.empty(1 if bias is None else 2, rows)
    if x.numel():
        with KernelCall() as call:
            call.run(
                *("norm", "norm_fwd", _types(x, weight, bias), (rows,), x, weight.contiguous()),
                *(None if bias is None else bias.contiguous(), Out(y), Out(stats), eps, rows, x.shape[-1]),
            )
    return y, stats


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx like x, dweight and dbias [width] (None without a bias), from dy like x."""
    x, weight, bias, stats = residuals
    rows, width, dy = rows_of(x), x.shape[-1], dy.contiguous()
    dx, dw = torch.empty_like(x), torch.zeros_like(weight, memory_format=torch.contiguous_format)
    db = None if bias is None else torch.zeros_like(bias, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, dw, db
    types, count = _types(x, weight, bias), pieces(rows)
    with KernelCall() as call:
        call.run("norm", "norm_bwd", types, (rows,), x, weight.contiguous(), stats, dy, Out(dx), rows, width)
        dw_pieces = call.scratch(count * width)
        db_pieces = None if db is None else call.scratch(count * width)
        grid = spans(rows, width)
        call.run("norm", "norm_bwd_weights", types, grid, x, stats, dy, dw_pieces, db_pieces, rows, width)
        column_sum(call, dw_pieces, count, dw)
        if db is not None:
            column_sum(call, db_pieces, count, db)
    return dx, dw, db


@OpenCL.impl(ops.layer_norm, id="opencl/cl", why_not=refuses(ops.layer_norm), bwd=_backward)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    y, stats = _forward(x, weight, bias, eps)
    return y, (x, weight, bias, stats)


@OpenCL.impl(ops.rms_norm, id="opencl/cl", why_not=refuses(ops.rms_norm), bwd=lambda kept, dy: _backward(kept, dy)[:2])
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    y, stats = _forward(x, weight, None, eps)
    return y, (x, weight, None, stats)
