"""rotary (kernels/rotary.cu). All layouts are passed as strides; x is copied only if its channels are not adjacent."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from hal import ops
from hal.backend_tools import angle_strides, rotary_from

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, refuses


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, interleaved: bool, sign: float) -> Tensor:
    """x [s, b, n, d], in another layout or packed [t, n, d], rotated; cos and sin [s, r/2] or [b, s, r/2]."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows = x if x.ndim == 4 else x[None]
    cos, sin = cos.contiguous(), sin.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    channels, half, lanes = x.shape[-1], cos.shape[-1], LANES[x.dtype]
    # A thread handles w elements at a time: 16 bytes if all addresses, sizes and strides allow it, else one pair.
    pairs = 2 * half if interleaved else half
    strides, angles = rows.stride()[:3], angle_strides(layout, cos)
    vec = aligned(x, cos, sin, y) and pairs % lanes == 0 and half % 4 == 0
    vec = vec and channels % lanes == 0 and all(s % lanes == 0 for s in strides)
    w = lanes if vec else 2 if interleaved else 1
    # Steps per head: rotated pairs, and the remaining channels, which are copied.
    chunks = pairs // w + (channels - 2 * half) // (w if vec or not interleaved else 1)
    total = rows.numel() // channels * chunks
    rotation = struct.pack("=3q2q3q3qd", *rows.shape[:3], channels, half, *strides, *angles, sign)
    launch.run(
        f"rotary<{TYPE[x.dtype]}, {w}, {'true' if interleaved else 'false'}>",
        (launch.blocks(-(-total // 256), launch.multiprocessors() * 16), 1),
        256 if total > 128 else 128,
        x,
        cos,
        sin,
        y,
        rotation,
    )
    return y


rotary, _backward = rotary_from(_rotate)
Cuda.impl(ops.rotary, id="cuda/kernel", why_not=refuses(ops.rotary, "x", "cos", "sin"), bwd=_backward)(rotary)
