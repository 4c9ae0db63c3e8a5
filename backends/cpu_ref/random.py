"""philox_uniform and dropout (kernels/dropout.c). The mask is redrawn in the backward pass, not stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hal
from hal import Call, Rng, address, dropout_threshold, ops
from hal.backend_tools import draw_device_reasons, draw_reasons, draw_rows, dropout_from

from .build import lib
from .device import CpuRef
from .memory import empty, empty_like
from .tensors import CODE, reasons


def draw_of(rng: Rng, shape: Sequence[int], width: int) -> tuple[int, ...]:
    """The kernels' description of a draw of `shape` (at least one element) in rows of `width`: seed, offset, index of
    the first element, four sizes, and the strides of all dimensions but the last."""
    index0, sizes, strides = draw_rows(rng, shape, width)
    return (rng.seed, rng.offset, index0, *sizes, *strides)


@hal.by_metadata
def _why_not_uniform(call: Call) -> Sequence[str]:
    return draw_device_reasons(call.device, "cpu", "cpu_ref") or draw_reasons(call.rng, call.shape)


@CpuRef.impl(ops.philox_uniform, id="cpu_ref/c", why_not=_why_not_uniform)
def philox_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    out = empty(tuple(shape), torch.float32)
    if out.numel():  # a full draw is one row, because all its elements are consecutive
        lib().hal_philox_uniform(out.data_ptr() or address(out), *draw_of(rng, shape, out.numel()))
    return out


def _drop(x: Tensor, p: float, rng: Rng) -> Tensor:
    """x with dropped elements, in x's shape and dtype."""
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
def _why_not_dropout(call: Call) -> Sequence[str]:
    return reasons(call.x) or draw_reasons(call.rng, call.x.shape)


dropout, _dropout_bwd = dropout_from(_drop)
CpuRef.impl(ops.dropout, id="cpu_ref/c", why_not=_why_not_dropout, bwd=_dropout_bwd)(dropout)
