"""rotary (kernels/rotary.cl). Layouts and non-contiguous x are strides; only a gap inside heads costs a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import ops

from .device import OpenCL
from .memory import Call, Out
from .tensors import reasons


def _why_not(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "SBND", interleaved: bool = False) -> Sequence[str]:
    return reasons(x, cos, sin)


def _angle_strides(layout: str, cos: Tensor) -> tuple[int, ...]:
    """Strides of the row dimensions of x in the contiguous cos; TND is [1, t, n, d]."""
    half = cos.shape[-1]
    per_sample = cos.shape[-2] * half if cos.ndim == 3 else 0
    steps = {"S": half, "T": half, "B": per_sample, "N": 0}
    first = () if len(layout) == 4 else (0,)
    return (*first, *(steps[letter] for letter in layout[:-1]))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, interleaved: bool, sign: float) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    heads = x if x.ndim == 4 else x[None]
    y = torch.empty(x.shape, dtype=x.dtype)
    if x.numel():
        with Call() as call:
            call.run(
                *("rotary", "rotary", {"T": x.dtype, "INTERLEAVED": int(interleaved)}, (math.prod(heads.shape[:3]),)),
                *(heads, cos.contiguous(), sin.contiguous(), Out(y), sign, *heads.shape[1:], cos.shape[-1]),
                *(*heads.stride()[:3], *_angle_strides(layout, cos)),
            )
    return y


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    cos, sin, layout, interleaved = residuals
    return (_rotate(dy, cos, sin, layout, interleaved, -1.0),)


@OpenCL.impl(ops.rotary, id="opencl/cl", why_not=_why_not, bwd=_backward)
def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "SBND", interleaved: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    return _rotate(x, cos, sin, layout, interleaved, 1.0), (cos, sin, layout, interleaved)
