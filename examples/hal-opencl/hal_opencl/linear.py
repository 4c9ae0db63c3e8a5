"""linear and linear_wgrad (kernels/linear.cl): all products are a b^T of strided operands that are packed first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ops

from .device import OpenCL
from .engine import engine
from .memory import KernelCall, Out
from .tensors import column_sum, pieces, refuses, rows_of, spans

_MR, _NV = 8, 2
"""Rows and vectors of a work-item's tile."""


def _pack(call: KernelCall, x: Tensor, tile: int) -> tuple[Any, int]:
    """x [rows, k] with any strides, packed in panels of `tile` rows, and the number of panels."""
    rows, k = x.shape
    panels = -(-rows // tile)
    packed = call.scratch(panels * tile * k)
    grid = (-(-panels // engine().group),)
    call.run("linear", "pack", _types(x), grid, x, packed, tile, rows, k, *x.stride())
    return packed, panels


def _types(x: Tensor) -> dict[str, Any]:
    """The -D options of linear.cl for operands of x's dtype."""
    return {"T": x.dtype, "MR": _MR, "NV": _NV}


def product(call: KernelCall, a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor) -> None:
    """c [m, n] = a [m, k] b [n, k]^T + bias [n]."""
    if not c.numel():
        return
    (left, row_panels), (right, column_panels) = _pack(call, a, _MR), _pack(call, b, _NV * engine().lanes)
    grid = (-(-row_panels // engine().group), column_panels)
    call.run("linear", "multiply", _types(c), grid, left, right, bias, Out(c), *c.shape, a.shape[1])


def _backward(
    residuals: tuple[Any, ...], dy: Tensor, *, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx [..., in], dweight [out, in] and dbias [out] from dy [..., out], as far as `needs` requires them."""
    x, weight = residuals
    dx = torch.empty(x.shape, dtype=x.dtype) if needs[0] else None
    dw = torch.empty(weight.shape, dtype=x.dtype) if needs[1] else None
    db = torch.zeros(weight.shape[0], dtype=x.dtype) if needs[2] else None
    rows = rows_of(dy)
    dy_rows, x_rows = dy.reshape(rows, dy.shape[-1]), x.reshape(rows, x.shape[-1])
    with KernelCall() as call:
        if dx is not None:
            product(call, dy_rows, weight.t(), None, dx.view(x_rows.shape))
        if dw is not None:
            product(call, dy_rows.t(), x_rows.t(), None, dw)
        if db is not None and dy.numel():
            count, width = pieces(rows), db.numel()
            partial, grid = call.scratch(count * width), spans(rows, width)
            call.run("reduce", "column_pieces", {"T": dy.dtype}, grid, dy_rows.contiguous(), partial, rows, width)
            column_sum(call, partial, count, db)
    return dx, dw, db


@OpenCL.impl(ops.linear, id="opencl/cl", why_not=refuses(ops.linear), bwd=_backward)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    y = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    rows = rows_of(x)
    with KernelCall() as call:
        x_rows = x.reshape(rows, x.shape[-1])
        product(call, x_rows, weight, None if bias is None else bias.contiguous(), y.view(rows, weight.shape[0]))
    return y, (x, weight)


_refuses_wgrad = refuses(ops.linear_wgrad, "x", "dy", "main_grad", "main_bias_grad")


@OpenCL.impl(ops.linear_wgrad, id="opencl/cl", why_not=_refuses_wgrad)
def linear_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> None:
    _, dw, db = _backward((x, main_grad), dy, needs=(False, True, main_bias_grad is not None))
    assert dw is not None
    main_grad += dw
    if main_bias_grad is not None:
        main_bias_grad += db
