"""rotary (kernels/rotary.c). Layouts and non-contiguous x are strides; only a gap inside heads costs a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import hal
from hal import address, ops

from .build import lib
from .device import CpuRef
from .memory import empty
from .tensors import CODE, REAL, parameter, reasons


@hal.by_metadata
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
    real = REAL[x.dtype]
    cos, sin = parameter(cos, real), parameter(sin, real)
    y = empty(x.shape, x.dtype)
    if x.numel():
        lib().hal_rotary(
            CODE[x.dtype],
            interleaved,
            sign,
            x.data_ptr() or address(x),
            cos.data_ptr() or address(cos),
            sin.data_ptr() or address(sin),
            y.data_ptr() or address(y),
            *rows.shape,
            cos.shape[-1],
            *rows.stride()[:3],
            *_angle_strides(layout, cos),
        )
    return y


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    cos, sin, layout, interleaved = residuals
    return (_rotate(dy, cos, sin, layout, interleaved, -1.0),)


@CpuRef.impl(ops.rotary, id="cpu_ref/c", why_not=_why_not, bwd=_backward)
def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "SBND", interleaved: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    return _rotate(x, cos, sin, layout, interleaved, 1.0), (cos, sin, layout, interleaved)
