"""philox_uniform and dropout (kernels/dropout.c). The mask is redrawn in the backward pass, not stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Rng, address, dropout_threshold, ops

from .build import lib
from .device import CpuRef
from .memory import empty, empty_like
from .tensors import CODE, reasons


def draw_of(rng: Rng, shape: Sequence[int], width: int) -> tuple[int, ...]:
    """The kernels' description of a draw of `shape`, at least one element, in rows of `width` (one row if it is all):
    seed, offset, index of the first element, four sizes, three strides (the last one is 1)."""
    if rng.full_shape is None:
        return (rng.seed, rng.offset, 0, 1, 1, math.prod(shape) // width, width, 0, 0, width)
    index0, strides = rng.indexing(shape)
    missing = 4 - len(shape)
    sizes, strides = (1,) * missing + tuple(shape), (0,) * missing + strides
    return (rng.seed, rng.offset, index0, *sizes, *strides[:3])


def draw_reasons(rng: Rng | None, shape: Sequence[int]) -> Sequence[str]:
    if rng is not None and rng.full_shape is not None and len(shape) > 4:
        return [f"a block of a draw with {len(shape)} dimensions (at most 4; a whole draw may have any number)"]
    return ()


@hal.by_metadata
def _why_not_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Sequence[str]:
    if device is not None and torch.device(device).type != "cpu":
        return [f"device {device} (cpu_ref draws into CPU memory)"]
    return draw_reasons(rng, shape)


@CpuRef.impl(ops.philox_uniform, id="cpu_ref/c", why_not=_why_not_uniform)
def philox_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    out = empty(tuple(shape), torch.float32)
    if out.numel():
        lib().hal_philox_uniform(out.data_ptr() or address(out), *draw_of(rng, shape, out.numel()))
    return out


def _drop(x: Tensor, p: float, rng: Rng) -> Tensor:
    x = x.contiguous()
    out = empty_like(x)
    if x.numel():
        draw = draw_of(rng, x.shape, x.numel())
        scale = 1.0 / (1.0 - p)
        lib().hal_dropout(
            CODE[x.dtype],
            x.data_ptr() or address(x),
            0,
            0,
            0,
            out.data_ptr() or address(out),
            0,
            dropout_threshold(p),
            scale,
            *draw,
        )
    return out


@hal.by_metadata
def _why_not_dropout(x: Tensor, p: float, rng: Rng | None) -> Sequence[str]:
    return reasons(x) or draw_reasons(rng, x.shape)


def _dropout_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    p, rng = residuals
    return (dy if p == 0.0 else _drop(dy, p, rng),)


@CpuRef.impl(ops.dropout, id="cpu_ref/c", why_not=_why_not_dropout, bwd=_dropout_bwd)
def dropout(x: Tensor, p: float, rng: Rng | None) -> tuple[Tensor, tuple[Any, ...]]:
    if p == 0.0 or rng is None:
        return x.clone(), (0.0, None)
    return _drop(x, p, rng), (p, rng)
