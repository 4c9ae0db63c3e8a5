"""bias_dropout_add (kernels/dropout.c), with a residual stream in x's dtype or float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Call, Rng, address, dropout_threshold, ops
from hal.backend_tools import draw_reasons

from .build import lib
from .device import CpuRef
from .memory import empty
from .random import draw_of
from .tensors import CODE, REAL, parameter, reasons

_NO_DRAW = Rng(0)


@hal.by_metadata
def _why_not(call: Call) -> Sequence[str]:
    x = call.x
    if x.dtype == torch.float64 != call.residual.dtype:
        return ["a float32 residual beside a float64 x (the kernel's sums would be float64)"]
    return reasons(x, call.bias, call.residual) or draw_reasons(call.rng, x.shape)


def _run(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, data: torch.dtype, p: float, rng: Rng | None
) -> None:
    """out = residual + dropout(x + bias), contiguous, all [..., width] except bias [width].

    data: the dtype of x in the op. x (here the gradient in the backward pass) and out may instead have the dtype of
    arithmetic, REAL[data].
    """
    if not out.numel():
        return
    threshold, scale = dropout_threshold(p), 1.0 / (1.0 - p)
    draw = draw_of(rng or _NO_DRAW, x.shape, x.shape[-1])
    lib().hal_dropout(
        CODE[data],
        x.data_ptr() or address(x),
        x.dtype != data,
        address(bias),
        address(residual),
        out.data_ptr() or address(out),
        out.dtype != data,
        threshold,
        scale,
        *draw,
    )


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, dbias (None without a bias) and dresidual, from dy [..., width]. The residual's gradient is dy itself."""
    bias, data, p, rng = residuals
    same = p == 0.0 and dy.dtype == data  # in this case the gradient of x is dy itself
    if same and bias is None:
        return dy, None, dy
    # dy has the dtype of the residual stream, which may be wider than that of dx.
    rows = dy.contiguous()
    dx = dy if same else empty(dy.shape, data)
    if bias is None:
        _run(rows, None, None, dx, data, p, rng)
        return dx, None, dy
    dbias = torch.zeros(bias.shape, dtype=REAL[data])
    if dy.numel():
        lib().hal_dropout_bwd(
            CODE[data],
            rows.data_ptr() or address(rows),
            dy.dtype != data,
            0 if same else dx.data_ptr() or address(dx),
            dbias.data_ptr() or address(dbias),
            dropout_threshold(p),
            1.0 / (1.0 - p),
            *draw_of(rng or _NO_DRAW, dy.shape, dy.shape[-1]),
        )
    return dx, dbias.to(bias.dtype), dy


@CpuRef.impl(ops.bias_dropout_add, id="cpu_ref/c", why_not=_why_not, bwd=_backward)
def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float = 0.0, rng: Rng | None = None
) -> tuple[Tensor, tuple[Any, ...]]:
    if rng is None:
        p = 0.0
    out = empty(residual.shape, residual.dtype)
    b = None if bias is None else parameter(bias, REAL[x.dtype])
    _run(x.contiguous(), b, residual.contiguous(), out, x.dtype, p, rng)
    return out, (bias, x.dtype, p, rng)
