"""rotary (kernels/rotary.cu). Layouts and non-contiguous x are strides; only a gap inside heads costs a copy."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import ops

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, reasons


def _why_not(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "SBND", interleaved: bool = False) -> Sequence[str]:
    return reasons(x, cos, sin)


def _angle_strides(layout: str, cos: Tensor) -> tuple[int, int, int]:
    """Strides (in elements of the contiguous cos) of the three row dimensions of x; TND is [1, t, n, d]."""
    half = cos.shape[-1]
    per_sample = cos.shape[-2] * half if cos.ndim == 3 else 0
    if layout == "SBND":
        return half, per_sample, 0
    if layout == "BSND":
        return per_sample, half, 0
    if layout == "BNSD":
        return per_sample, 0, half
    return 0, half, 0


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, interleaved: bool, sign: float) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows = x if x.ndim == 4 else x[None]
    cos, sin = cos.contiguous(), sin.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    channels, half, lanes = x.shape[-1], cos.shape[-1], LANES[x.dtype]
    pairs = 2 * half if interleaved else half
    strides, angles = rows.stride()[:3], _angle_strides(layout, cos)
    vec = aligned(x, cos, sin, y) and pairs % lanes == 0 and half % 4 == 0
    vec = vec and channels % lanes == 0 and all(s % lanes == 0 for s in strides)
    w = lanes if vec else 2 if interleaved else 1
    chunks = pairs // w + (channels - 2 * half) // (w if vec or not interleaved else 1)
    total = rows.numel() // channels * chunks
    turn = struct.pack("=3q2q3q3qd", *rows.shape[:3], channels, half, *strides, *angles, sign)
    launch.run(
        f"rotary<{TYPE[x.dtype]}, {w}, {'true' if interleaved else 'false'}>",
        (min(-(-total // 256), launch.multiprocessors() * 16), 1),
        256 if total > 128 else 128,
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        y.data_ptr(),
        turn,
    )
    return y


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    cos, sin, layout, interleaved = residuals
    return (_rotate(dy, cos, sin, layout, interleaved, -1.0),)


@Cuda.impl(ops.rotary, id="cuda/kernel", why_not=_why_not, bwd=_backward)
def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "SBND", interleaved: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    return _rotate(x, cos, sin, layout, interleaved, 1.0), (cos, sin, layout, interleaved)
