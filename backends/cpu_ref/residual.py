"""bias_dropout_add (kernels/dropout.c), with a residual stream in x's dtype or float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hal
from hal import Call, Rng, address, dropout_threshold, ops
from hal.backend_tools import bias_dropout_add_from, draw_reasons

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


def _add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, rng: Rng | None) -> Tensor:
    out = empty(residual.shape, residual.dtype)
    b = None if bias is None else parameter(bias, REAL[x.dtype])
    _run(x.contiguous(), b, residual.contiguous(), out, x.dtype, p, rng)
    return out


def _gradients(
    dy: Tensor, wants_dx: bool, bias: Tensor | None, data: torch.dtype, p: float, rng: Rng | None
) -> tuple[Tensor | None, Tensor | None]:
    """dx in the dtype `data` if wanted, and dbias (None without a bias), from dy [..., width]."""
    dx = empty(dy.shape, data) if wants_dx else None
    if bias is None:
        assert dx is not None
        _run(dy, None, None, dx, data, p, rng)
        return dx, None
    dbias = torch.zeros(bias.shape, dtype=REAL[data])
    if dy.numel():
        lib().hal_dropout_bwd(
            CODE[data],
            dy.data_ptr() or address(dy),
            dy.dtype != data,
            address(dx),
            dbias.data_ptr() or address(dbias),
            dropout_threshold(p),
            1.0 / (1.0 - p),
            *draw_of(rng or _NO_DRAW, dy.shape, dy.shape[-1]),
        )
    return dx, dbias.to(bias.dtype)


bias_dropout_add, _backward = bias_dropout_add_from(_add, _gradients)
CpuRef.impl(ops.bias_dropout_add, id="cpu_ref/c", why_not=_why_not, bwd=_backward)(bias_dropout_add)
