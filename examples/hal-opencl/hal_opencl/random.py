"""philox_uniform, dropout and bias_dropout_add (kernels/random.cl). The backward pass draws the mask again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hal import Call, Rng, dropout_threshold, ops
from hal.backend_tools import bias_dropout_add_from, draw_device_reasons, draw_reasons, draw_rows, dropout_from

from .device import OpenCL
from .engine import CHUNK
from .memory import KernelCall, Out
from .tensors import column_sum, pieces, reasons, spans

_NO_DRAW = Rng(0)


def _draw(rng: Rng, shape: Sequence[int], width: int) -> tuple[tuple[Any, ...], int, int]:
    """(DRAW arguments of kernels, number of rows, row width) for a draw of `shape` in rows of `width`."""
    first, sizes, strides = draw_rows(rng, shape, width)
    draw = (np.uint64(rng.seed), np.uint64(rng.offset), first, *sizes[1:3], *strides)
    return draw, math.prod(sizes[:3]), sizes[3]


def _grid(rows: int, width: int) -> tuple[int, int]:
    """The grid of a kernel over the rows of a draw."""
    return -(-width // CHUNK), rows


def _why_not_uniform(call: Call) -> Sequence[str]:
    return draw_device_reasons(call.device, "cpu", "opencl") or draw_reasons(call.rng, call.shape)


@OpenCL.impl(ops.philox_uniform, id="opencl/cl", why_not=_why_not_uniform)
def philox_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    out = torch.empty(tuple(shape), dtype=torch.float32)
    if out.numel():
        draw, rows, width = _draw(rng, shape, out.numel())
        with KernelCall() as call:
            call.run("random", "philox_uniform", _TYPES, _grid(rows, width), Out(out), *draw, width)
    return out


_TYPES = {"T": torch.float32, "R": torch.float32}


def _drop(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype, p: float, rng: Rng | None
) -> Tensor:
    """residual + dropout(x + bias), in `dtype`."""
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dtype)
    if not x.numel():
        return y
    draw, rows, width = _draw(rng or _NO_DRAW, x.shape, x.numel() if bias is None else x.shape[-1])
    with KernelCall() as call:
        call.run(
            *("random", "dropout", {"T": x.dtype, "R": dtype}, _grid(rows, width), x),
            None if bias is None else bias.contiguous(),
            None if residual is None else residual.contiguous(),
            *(Out(y), np.uint32(dropout_threshold(p)), 1.0 / (1.0 - p), *draw, width),
        )
    return y


def _why_not_dropout(call: Call) -> Sequence[str]:
    return reasons(call.x) or draw_reasons(call.rng, call.x.shape)


dropout, _dropout_bwd = dropout_from(lambda x, p, rng: _drop(x, None, None, x.dtype, p, rng))
OpenCL.impl(ops.dropout, id="opencl/cl", why_not=_why_not_dropout, bwd=_dropout_bwd)(dropout)


def _why_not_add(call: Call) -> Sequence[str]:
    return reasons(call.x, call.bias, call.residual) or draw_reasons(call.rng, call.x.shape)


def _add_gradients(
    dy: Tensor, wants_dx: bool, bias: Tensor | None, dtype: torch.dtype, p: float, rng: Rng | None
) -> tuple[Tensor | None, Tensor | None]:
    """dx in `dtype`, wanted or not, and dbias (None without a bias), from dy [..., width]."""
    if bias is None:
        return _drop(dy, None, None, dtype, p, rng), None
    dx, dbias = torch.empty(dy.shape, dtype=dtype), torch.zeros_like(bias)
    if dy.numel():
        draw, count, width = _draw(rng or _NO_DRAW, dy.shape, dy.shape[-1])
        with KernelCall() as call:
            partial = call.scratch(pieces(count) * width)
            call.run(
                *("random", "dropout_bwd", {"T": dtype, "R": dy.dtype}, spans(count, width)),
                *(dy, Out(dx), partial, np.uint32(dropout_threshold(p)), 1.0 / (1.0 - p), *draw, count, width),
            )
            column_sum(call, partial, pieces(count), dbias)
    return dx, dbias


bias_dropout_add, _add_bwd = bias_dropout_add_from(
    lambda x, bias, residual, p, rng: _drop(x, bias, residual, residual.dtype, p, rng), _add_gradients
)
OpenCL.impl(ops.bias_dropout_add, id="opencl/cl", why_not=_why_not_add, bwd=_add_bwd)(bias_dropout_add)
