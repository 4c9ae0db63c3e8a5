"""Builds ops.rotary from one function that rotates by an angle or its negative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def angle_strides(layout: str, cos: Tensor) -> tuple[int, int, int]:
    """Strides (in elements of the contiguous cos) of the three row dimensions of x; TND counts as [1, t, n, d]."""
    half = cos.shape[-1]
    per_sample = cos.shape[-2] * half if cos.ndim == 3 else 0
    if layout == "SBND":
        return half, per_sample, 0
    if layout == "BSND":
        return per_sample, half, 0
    if layout == "BNSD":
        return per_sample, 0, half
    return 0, half, 0


def rotary_from(
    rotate: Callable[[Tensor, Tensor, Tensor, str, bool, float], Tensor],
) -> tuple[Callable[..., tuple[Tensor, tuple[Any, ...]]], Callable[..., tuple[Tensor]]]:
    """The forward and backward function of ops.rotary, for `Backend.impl`.

    rotate(x, cos, sin, layout, interleaved, sign): x rotated by the angles, or by their negatives with sign -1.0. The
    latter computes the gradient from dy, because the transpose of a rotation is its inverse.
    """

    def rotary(
        x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "SBND", interleaved: bool = False
    ) -> tuple[Tensor, tuple[Any, ...]]:
        return rotate(x, cos, sin, layout, interleaved, 1.0), (cos, sin, layout, interleaved)

    def backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
        cos, sin, layout, interleaved = residuals
        return (rotate(dy, cos, sin, layout, interleaved, -1.0),)

    return rotary, backward
