"""philox_uniform and dropout (kernels/dropout.cu). The mask is drawn again in the backward pass, not stored."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Rng, address, dropout_threshold, ops

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, grid_for, reasons


def draw_of(rng: Rng, shape: Sequence[int], width: int) -> tuple[bytes, int]:
    """(struct Draw of kernels/common.h, its rows): a draw of `shape` in rows of `width` (one row if it is all)."""
    if rng.full_shape is None:
        index0, sizes, strides = 0, (1, 1, math.prod(shape) // width, width), (0, 0, width)
    else:
        index0, full = rng.indexing(shape)
        missing = 4 - len(shape)
        sizes, strides = (1,) * missing + tuple(shape), ((0,) * missing + full)[:3]
    return struct.pack("=QQq4q3q", rng.seed, rng.offset, index0, *sizes, *strides), math.prod(sizes[:3])


def draw_reasons(rng: Rng | None, shape: Sequence[int]) -> Sequence[str]:
    if rng is not None and rng.full_shape is not None and len(shape) > 4:
        return [f"a block of a draw with {len(shape)} dimensions (at most 4; a whole draw may have any number)"]
    return ()


def draw_width(rng: Rng | None, shape: Sequence[int]) -> int:
    """The width of a draw's rows when no other tensor dictates it: everything, or a block's last dimension."""
    return math.prod(shape) if rng is None or rng.full_shape is None or not shape else shape[-1]


def run_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, p: float, rng: Rng, width: int
) -> None:
    """y = residual + dropout(x + bias), all contiguous; `width` divides them into rows (bias's width)."""
    if not y.numel():
        return
    draw, rows = draw_of(rng, y.shape, width)
    lanes = max(LANES[x.dtype], LANES[y.dtype])
    vec = aligned(x, bias, residual, y) and (rows == 1 or width % lanes == 0)
    grid, threads = grid_for(rows, width, lanes if vec else 1)
    launch.run(
        f"dropout<{TYPE[x.dtype]}, {TYPE[y.dtype]}>",
        grid,
        threads,
        x.data_ptr(),
        address(bias),
        address(residual),
        y.data_ptr(),
        draw,
        dropout_threshold(p),
        1.0 / (1.0 - p),
        int(vec),
    )


def _why_not_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Sequence[str]:
    if device is not None and torch.device(device).type not in (launch.device_type(), "meta"):
        return [f"device {device} (this backend draws on {launch.device_type()})"]
    elsewhere = "" if device is None else launch.elsewhere(torch.device(device))
    if elsewhere:
        return [elsewhere]
    return draw_reasons(rng, shape)


def _current() -> torch.device:
    """Where a kernel launched now draws; hal.device() is always the first GPU."""
    return hal.device() if launch.simulated() else torch.device("cuda", torch.cuda.current_device())


@Cuda.impl(ops.philox_uniform, id="cuda/kernel", why_not=_why_not_uniform)
def philox_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    out = torch.empty(tuple(shape), dtype=torch.float32, device=_current() if device is None else device)
    if out.numel():
        width = draw_width(rng, out.shape)
        draw, rows = draw_of(rng, out.shape, width)
        vec = rows == 1 or width % 4 == 0
        grid, threads = grid_for(rows, width, 4 if vec else 1)
        launch.run("philox_uniform", grid, threads, out.data_ptr(), draw, int(vec))
    return out


def drop(x: Tensor, p: float, rng: Rng) -> Tensor:
    """dropout(x) without autograd; its own backward."""
    x = x.contiguous()
    y = torch.empty_like(x)
    run_dropout(x, None, None, y, p, rng, draw_width(rng, x.shape))
    return y


def _why_not_dropout(x: Tensor, p: float, rng: Rng | None) -> Sequence[str]:
    return reasons(x) or draw_reasons(rng, x.shape)


def _dropout_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    p, rng = residuals
    return (dy if p == 0.0 else drop(dy, p, rng),)


@Cuda.impl(ops.dropout, id="cuda/kernel", why_not=_why_not_dropout, bwd=_dropout_bwd)
def dropout(x: Tensor, p: float, rng: Rng | None) -> tuple[Tensor, tuple[Any, ...]]:
    if p == 0.0 or rng is None:
        return x.clone(), (0.0, None)
    return drop(x, p, rng), (p, rng)
