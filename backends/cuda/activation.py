"""swiglu, geglu and bias_gelu (kernels/activation.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import address, ops

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, column_sum, grid_for, reasons

_SILU = 0
_GELU = {"none": 1, "tanh": 2, "fast": 3}


def _forward(x: Tensor, bias: Tensor | None, kind: int, gated: bool) -> tuple[Tensor, tuple[Any, ...]]:
    x, b = x.contiguous(), None if bias is None else bias.contiguous()
    width = x.shape[-1] // (2 if gated else 1)
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if y.numel():
        rows, lanes = y.numel() // width, LANES[x.dtype]
        vec = aligned(x, b, y) and width % lanes == 0
        grid, threads = grid_for(rows, width, lanes if vec else 1)
        name = f"activation_fwd<{TYPE[x.dtype]}, {'true' if gated else 'false'}>"
        launch.run(name, grid, threads, x.data_ptr(), address(b), y.data_ptr(), kind, rows, width, int(vec))
    return y, (x, b, kind, gated)


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias, kind, gated = residuals
    dy, dx = dy.contiguous(), torch.empty_like(x)
    dbias = None if bias is None else torch.empty_like(bias)
    if not x.numel():
        return dx, None if dbias is None else dbias.zero_()
    width, lanes = dy.shape[-1], LANES[x.dtype]
    rows = dy.numel() // width
    vec = aligned(x, bias, dy, dx) and width % lanes == 0
    grid, threads = grid_for(rows, width, lanes if vec else 1)
    partial = None if dbias is None else torch.empty(grid[1], x.shape[-1], dtype=torch.float32, device=x.device)
    launch.run(
        f"activation_bwd<{TYPE[x.dtype]}, {'true' if gated else 'false'}>",
        grid,
        threads,
        x.data_ptr(),
        address(bias),
        dy.data_ptr(),
        dx.data_ptr(),
        address(partial),
        kind,
        rows,
        width,
        int(vec),
    )
    if dbias is not None and partial is not None:
        column_sum(partial, grid[1], dbias)
    return dx, dbias


def _why_not(x: Tensor, bias: Tensor | None = None) -> Sequence[str]:
    return reasons(x, bias)


def _why_not_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> Sequence[str]:
    return reasons(x, bias)


@Cuda.impl(ops.swiglu, id="cuda/kernel", why_not=_why_not, bwd=_backward)
def swiglu(x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, bias, _SILU, True)


@Cuda.impl(ops.geglu, id="cuda/kernel", why_not=_why_not_gelu, bwd=_backward)
def geglu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, bias, _GELU[approximate], True)


@Cuda.impl(ops.bias_gelu, id="cuda/kernel", why_not=_why_not_gelu, bwd=_backward)
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, bias, _GELU[approximate], False)
