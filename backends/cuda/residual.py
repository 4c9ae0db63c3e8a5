"""bias_dropout_add (kernels/dropout.cu), with a residual stream in x's dtype or float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import Call, Rng, dropout_threshold, ops
from hal.backend_tools import bias_dropout_add_from, draw_reasons

from . import launch
from .device import Cuda
from .random import draw_of, run_dropout
from .tensors import LANES, TYPE, aligned, column_sum, grid_for, reasons

_NO_DRAW = Rng(0)


def _why_not(call: Call) -> Sequence[str]:
    return reasons(call.x, call.bias, call.residual) or draw_reasons(call.rng, call.x.shape)


def _add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, rng: Rng | None) -> Tensor:
    """residual + dropout(x + bias) in residual's dtype; x and residual [..., width], bias [width]."""
    y = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    dense = None if bias is None else bias.contiguous()
    if y.numel():
        run_dropout(x.contiguous(), dense, residual.contiguous(), y, p, rng or _NO_DRAW, x.shape[-1])
    return y


def _gradients(
    dy: Tensor, wants_dx: bool, bias: Tensor | None, data: torch.dtype, p: float, rng: Rng | None
) -> tuple[Tensor | None, Tensor | None]:
    """dx in the dtype `data` if wanted, and dbias (None without a bias), from dy [..., width]."""
    dx = torch.empty(dy.shape, dtype=data, device=dy.device) if wants_dx else None
    dbias = None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    if not dy.numel():
        return dx, None if dbias is None else dbias.zero_()
    width = dy.shape[-1]
    draw, rows, whole = draw_of(rng or _NO_DRAW, dy.shape, width)
    lanes = max(LANES[data], LANES[dy.dtype])
    vec = whole and aligned(dy, dx) and width % lanes == 0
    # On an H100 (8192 x 4096, bfloat16), 3 blocks per multiprocessor take 56 us, 2 take 60, 6 take 61 and 8 take 65,
    # because each has partial sums to write.
    grid, threads = grid_for(rows, width, lanes if vec else 1, 3)
    partial = None if bias is None else torch.empty(grid[1], width, dtype=torch.float32, device=dy.device)
    launch.run(
        f"dropout_bwd<{TYPE[data]}, {TYPE[dy.dtype]}>",
        grid,
        threads,
        dy,
        dx,
        partial,
        draw,
        dropout_threshold(p),
        1.0 / (1.0 - p),
        int(vec),
    )
    if dbias is not None and partial is not None:
        column_sum(partial, grid[1], dbias)
    return dx, dbias


bias_dropout_add, _backward = bias_dropout_add_from(_add, _gradients)
Cuda.impl(ops.bias_dropout_add, id="cuda/kernel", why_not=_why_not, bwd=_backward)(bias_dropout_add)
