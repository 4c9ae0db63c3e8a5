"""swiglu, geglu and bias_gelu (kernels/activation.cu)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.backend_tools import activations_from

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, column_sum, grid_for, refuses

_KIND = {"silu": "SILU", "none": "GELU_ERF", "tanh": "GELU_TANH", "fast": "GELU_FAST"}


def _kernel(name: str, dtype: torch.dtype, gated: bool, kind: str) -> str:
    return f"activation_{name}<{TYPE[dtype]}, {'true' if gated else 'false'}, {_KIND[kind]}>"


def _forward(x: Tensor, bias: Tensor | None, kind: str, gated: bool) -> tuple[Tensor, tuple[Any, ...]]:
    """y [..., h] and residuals, for x [..., h] or, gated, [..., 2h]; bias has the length of the rows of x."""
    x, b = x.contiguous(), None if bias is None else bias.contiguous()
    width = x.shape[-1] // (2 if gated else 1)
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if y.numel():
        rows, lanes = y.numel() // width, LANES[x.dtype]
        vec = aligned(x, b, y) and width % lanes == 0
        grid, threads = grid_for(rows, width, lanes if vec else 1)
        launch.run(_kernel("fwd", x.dtype, gated, kind), grid, threads, x, b, y, rows, width, int(vec))
    return y, (x, b, kind, gated)


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx like x, and dbias (None without a bias), from dy [..., h]."""
    x, bias, kind, gated = residuals
    dbias = None if bias is None else torch.empty_like(bias)
    return gradient(x, bias, kind, gated, dy, dbias), dbias


def gradient(x: Tensor, bias: Tensor | None, kind: str, gated: bool, dy: Tensor, dbias: Tensor | None) -> Tensor:
    """dx like x, from dy [..., h]; fills dbias (like a row of x) with dx's sum over the rows, unless it is None."""
    dy, dx = dy.contiguous(), torch.empty_like(x)
    if not x.numel():
        if dbias is not None:
            dbias.zero_()
        return dx
    width, lanes = dy.shape[-1], LANES[x.dtype]
    rows = dy.numel() // width
    vec = aligned(x, bias, dy, dx) and width % lanes == 0
    # Each of the grid[1] pieces of rows has separate column sums, which are added in order afterwards, without atomics.
    grid, threads = grid_for(rows, width, lanes if vec else 1)
    partial = None if dbias is None else torch.empty(grid[1], x.shape[-1], dtype=torch.float32, device=x.device)
    launch.run(_kernel("bwd", x.dtype, gated, kind), grid, threads, x, bias, dy, dx, partial, rows, width, int(vec))
    if dbias is not None and partial is not None:
        column_sum(partial, grid[1], dbias)
    return dx


swiglu, geglu, bias_gelu = activations_from(_forward)
Cuda.impl(ops.swiglu, id="cuda/kernel", why_not=refuses(ops.swiglu), bwd=_backward)(swiglu)
Cuda.impl(ops.geglu, id="cuda/kernel", why_not=refuses(ops.geglu), bwd=_backward)(geglu)
Cuda.impl(ops.bias_gelu, id="cuda/kernel", why_not=refuses(ops.bias_gelu), bwd=_backward)(bias_gelu)
