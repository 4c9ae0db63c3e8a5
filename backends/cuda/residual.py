"""bias_dropout_add (kernels/dropout.cu), with a residual stream in x's dtype or float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, Rng, dropout_threshold, ops
from hal.backend_tools import draw_reasons

from . import launch
from .device import Cuda
from .random import draw_of, run_dropout
from .tensors import LANES, TYPE, aligned, column_sum, grid_for, reasons

_NO_DRAW = Rng(0)


def _why_not(call: Call) -> Sequence[str]:
    return reasons(call.x, call.bias, call.residual) or draw_reasons(call.rng, call.x.shape)


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, dbias (None without a bias) and dresidual, from dy [..., width]. The residual's gradient is dy itself."""
    bias, data, p, rng = residuals
    same = p == 0.0 and dy.dtype == data  # in this case the gradient of x is dy itself
    if same and bias is None:
        return dy, None, dy
    dense = dy.contiguous()
    dx = None if same else torch.empty(dense.shape, dtype=data, device=dy.device)
    dbias = None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    if not dense.numel():
        return dy if dx is None else dx, None if dbias is None else dbias.zero_(), dy
    width = dense.shape[-1]
    draw, rows = draw_of(rng or _NO_DRAW, dense.shape, width)
    lanes = max(LANES[data], LANES[dy.dtype])
    vec = aligned(dense, dx) and width % lanes == 0
    grid, threads = grid_for(rows, width, lanes if vec else 1)
    partial = None if bias is None else torch.empty(grid[1], width, dtype=torch.float32, device=dy.device)
    launch.run(
        f"dropout_bwd<{TYPE[data]}, {TYPE[dy.dtype]}>",
        grid,
        threads,
        dense,
        dx,
        partial,
        draw,
        dropout_threshold(p),
        1.0 / (1.0 - p),
        int(vec),
    )
    if dbias is not None and partial is not None:
        column_sum(partial, grid[1], dbias)
    return dy if dx is None else dx, dbias, dy


@Cuda.impl(ops.bias_dropout_add, id="cuda/kernel", why_not=_why_not, bwd=_backward)
def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float = 0.0, rng: Rng | None = None
) -> tuple[Tensor, tuple[Any, ...]]:
    if rng is None:
        p = 0.0
    y = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    dense = None if bias is None else bias.contiguous()
    if y.numel():
        run_dropout(x.contiguous(), dense, residual.contiguous(), y, p, rng or _NO_DRAW, x.shape[-1])
    return y, (bias, x.dtype, p, rng)
