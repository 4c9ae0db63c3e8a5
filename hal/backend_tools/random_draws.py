"""Describes random draws for kernels, and builds ops.dropout and ops.bias_dropout_add from functions that draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.rng import Rng

Rows = tuple[int, tuple[int, ...], tuple[int, ...]]


def draw_rows(rng: Rng, shape: Sequence[int], width: int) -> Rows:
    """A draw of `shape` (at least one element) in a kernel's terms: (index of the first element, sizes, strides).

    sizes is [a, b, c, width], where the last dimension is a row of consecutive elements. strides are those of a, b and
    c, in elements of the full draw. A draw that is not a block of a larger one is split into rows of `width`, which
    must divide its size; a block keeps the rows of its shape.
    """
    if rng.full_shape is None:
        return 0, (1, 1, math.prod(shape) // width, width), (0, 0, width)
    index0, *strides = draw_steps(rng, shape)
    return index0, (1,) * (4 - len(shape)) + tuple(shape), tuple(strides)


def draw_steps(rng: Rng, shape: Sequence[int]) -> tuple[int, int, int, int]:
    """(index of the first element, strides of the first three dimensions) of a draw of up to four dimensions.

    The last dimension's stride is 1; missing leading dimensions have stride 0. Indices refer to the full draw if this
    one is a block.
    """
    index0, strides = rng.indexing(shape)
    a, b, c = ((0,) * (4 - len(strides)) + strides)[:3]
    return index0, a, b, c


def draw_reasons(rng: Rng | None, shape: Sequence[int]) -> Sequence[str]:
    """Reasons why `draw_rows` cannot describe this draw; empty if it can."""
    if rng is not None and rng.full_shape is not None and len(shape) > 4:
        return [f"a block of a draw with {len(shape)} dimensions (at most 4; a full draw may have any number)"]
    return ()


def draw_device_reasons(device: torch.device | str | None, kind: str, backend: str) -> Sequence[str]:
    """Reasons why a backend cannot draw on the device that ops.philox_uniform was given; empty if it can.

    kind: the type of the devices in whose memory the backend draws ("cpu"). backend: its name, for the message.
    """
    if device is None or torch.device(device).type == kind:
        return ()
    return [f"device {device} ({backend} draws into {kind.upper()} memory)"]


def dropout_from(
    drop: Callable[[Tensor, float, Rng], Tensor],
) -> tuple[Callable[..., tuple[Tensor, tuple[Any, ...]]], Callable[..., tuple[Tensor]]]:
    """The forward and backward function of ops.dropout, for `Backend.impl`.

    drop(x, p, rng): x with elements dropped with probability p > 0, the rest scaled by 1 / (1 - p), in new memory. The
    gradient drops the same elements of dy: the mask is drawn again, not stored.
    """

    def dropout(x: Tensor, p: float, rng: Rng | None) -> tuple[Tensor, tuple[Any, ...]]:
        if p == 0.0 or rng is None:
            return x.clone(), (0.0, None)
        return drop(x, p, rng), (p, rng)

    def backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
        p, rng = residuals
        return (dy if p == 0.0 else drop(dy, p, rng),)

    return dropout, backward


def bias_dropout_add_from(
    add: Callable[[Tensor, Tensor | None, Tensor, float, Rng | None], Tensor],
    gradients: Callable[
        [Tensor, bool, Tensor | None, torch.dtype, float, Rng | None], tuple[Tensor | None, Tensor | None]
    ],
) -> tuple[Callable[..., tuple[Tensor, tuple[Any, ...]]], Callable[..., tuple[Tensor, Tensor | None, Tensor]]]:
    """The forward and backward function of ops.bias_dropout_add, for `Backend.impl`.

    add(x [..., width], bias [width], residual [..., width], p, rng): residual + dropout(x + bias) in residual's dtype,
        in new memory. p is 0 if rng is None.
    gradients(dy [..., width], wants_dx, bias, dtype, p, rng): (dx in `dtype`, dbias), where dbias is None without a
        bias; dy is contiguous. dx is not used unless wants_dx: without dropout and in the dtype of dy, it is dy itself.
        The function is not called for such a dx if there is no bias.
    """

    def bias_dropout_add(
        x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float = 0.0, rng: Rng | None = None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        if rng is None:
            p = 0.0
        return add(x, bias, residual, p, rng), (bias, x.dtype, p, rng)

    def backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        bias, dtype, p, rng = residuals
        # dy has the dtype of the residual stream, which may be wider than that of x.
        wants_dx = p != 0.0 or dy.dtype != dtype
        if not wants_dx and bias is None:
            return dy, None, dy
        dx, dbias = gradients(dy.contiguous(), wants_dx, bias, dtype, p, rng)
        if not wants_dx:
            return dy, dbias, dy
        assert dx is not None
        return dx, dbias, dy

    return bias_dropout_add, backward
