"""philox_uniform and dropout (kernels/dropout.cu). The mask is drawn again in the backward pass, not stored."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

import hal
from hal import Call, Rng, dropout_threshold, ops
from hal.backend_tools import draw_reasons, draw_rows, dropout_from

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, grid_for, reasons


def draw_of(rng: Rng, shape: Sequence[int], width: int) -> tuple[bytes, int, bool]:
    """(struct Draw of kernels/common.h, number of rows, whether every row begins with a Philox block of 4 elements) for
    a draw of `shape` in rows of `width`."""
    index0, sizes, strides = draw_rows(rng, shape, width)
    rows = math.prod(sizes[:3])
    if rows >= 2**31:
        raise hal.HalError(
            f"a draw of {tuple(shape)} has {rows} rows of {width} elements, and the kernels count up to 2^31 - 1; give "
            "it a longer last dimension"
        )
    whole = not any(n % 4 for n in (index0, *(stride for size, stride in zip(sizes, strides) if size > 1)))
    return packed_draw(rng.seed, rng.offset, index0, sizes, strides), rows, whole


def packed_draw(seed: int, offset: int, index0: int, sizes: Sequence[int], strides: Sequence[int]) -> bytes:
    """struct Draw of kernels/common.h; sizes has four numbers, strides three."""
    return _round_keys(seed) + struct.pack("=Qq4q3q", offset, index0, *sizes, *strides)


@lru_cache(maxsize=64)
def _round_keys(seed: int) -> bytes:
    """The two keys of each of the ten rounds of Philox4x32-10, as u32 keys[10][2] of kernels/common.h."""
    words = ((seed + i * 0x9E3779B9, (seed >> 32) + i * 0xBB67AE85) for i in range(10))
    return struct.pack("=20I", *(word & 0xFFFFFFFF for pair in words for word in pair))


def draw_width(rng: Rng | None, shape: Sequence[int]) -> int:
    """The row width of a draw that no other tensor determines: the last dimension of a block; of a full draw, as many
    dimensions as make rows of whole vectors and at least 2,048 elements, so that each thread has several to load."""
    width = 1
    for size in reversed(shape):
        width *= size
        if (rng is not None and rng.full_shape is not None) or (width >= 2048 and width % 16 == 0):
            break
    return width


def run_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, p: float, rng: Rng, width: int
) -> None:
    """y = residual + dropout(x + bias), all contiguous; `width` is the length of rows, and of bias. Without a residual
    there is no bias, and y has the dtype of x."""
    if not y.numel():
        return
    draw, rows, whole = draw_of(rng, y.shape, width)
    # A thread's columns are a multiple of the 16-byte vectors of both dtypes.
    lanes = max(LANES[x.dtype], LANES[y.dtype])
    vec = whole and aligned(x, bias, residual, y) and (rows == 1 or width % lanes == 0)
    grid, threads = grid_for(rows, width, lanes if vec else 1)
    launch.run(
        f"dropout<{TYPE[x.dtype]}, {TYPE[y.dtype]}, {'false' if residual is None else 'true'}>",
        grid,
        threads,
        x,
        bias,
        residual,
        y,
        draw,
        dropout_threshold(p),
        1.0 / (1.0 - p),
        int(vec),
    )


def _why_not_uniform(call: Call) -> Sequence[str]:
    device = call.device
    if device is not None and torch.device(device).type not in (launch.device_type(), "meta"):
        return [f"device {device} (this backend draws on {launch.device_type()})"]
    return draw_reasons(call.rng, call.shape)


def _current() -> torch.device:
    """The device that a kernel launched now runs on; hal.device() is always the first GPU."""
    return hal.device() if launch.simulated() else torch.device("cuda", torch.cuda.current_device())


@Cuda.impl(ops.philox_uniform, id="cuda/kernel", why_not=_why_not_uniform)
def philox_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    out = torch.empty(tuple(shape), dtype=torch.float32, device=_current() if device is None else device)
    if out.numel():
        width = draw_width(rng, out.shape)
        draw, rows, whole = draw_of(rng, out.shape, width)
        vec = whole and (rows == 1 or width % 4 == 0)
        grid, threads = grid_for(rows, width, 4 if vec else 1)
        launch.run("philox_uniform", grid, threads, out, draw, int(vec))
    return out


def drop(x: Tensor, p: float, rng: Rng) -> Tensor:
    """dropout(x) without autograd; applied to dy it is the backward pass."""
    x = x.contiguous()
    y = torch.empty_like(x)
    run_dropout(x, None, None, y, p, rng, draw_width(rng, x.shape))
    return y


def _why_not_dropout(call: Call) -> Sequence[str]:
    return reasons(call.x) or draw_reasons(call.rng, call.x.shape)


dropout, _dropout_bwd = dropout_from(drop)
Cuda.impl(ops.dropout, id="cuda/kernel", why_not=_why_not_dropout, bwd=_dropout_bwd)(dropout)
