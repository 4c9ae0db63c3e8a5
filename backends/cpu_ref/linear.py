"""linear: float32 products by oneDNN where torch.mm would take MKL's slow path, everything else by torch.

MKL keeps its AVX-512 kernels for Intel's processors; on others torch.mm runs float32 at half the speed of oneDNN, which
torch brings along and offers through the operator its compiler uses for fused layers. Accuracy is the same (float32
products and sums). 16-bit products go through oneDNN in torch.mm already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hal import ops

from . import cpu
from .device import CpuRef
from .tensors import reasons

_SMALL = 1 << 22
"""Below this many multiplications the two cost the same, and torch.mm has the cheaper call."""


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """oneDNN's x w^T + b, if torch has it and MKL is slow on this processor."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return None
    if cpu.vendor() == "GenuineIntel" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return product


def _product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [m, k] times the transpose of w [n, k], plus bias [n]."""
    onednn = _onednn()
    if onednn is None or x.dtype != torch.float32 or x.shape[0] * x.shape[1] * w.shape[0] < _SMALL:
        return torch.nn.functional.linear(x, w, bias)
    return onednn(_dense(x), _dense(w), bias, "none", [], "")


def _dense(x: Tensor) -> Tensor:
    """x, copied if neither its rows nor its columns are contiguous: oneDNN would take a scalar loop."""
    return x if 1 in x.stride() else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[str]:
    return reasons(x, weight, bias)


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight, has_bias = residuals
    n_out, n_in = weight.shape
    dy_rows, x_rows = _rows(dy), _rows(x)
    dx = _product(dy_rows, weight.t()).view(x.shape)
    if n_out >= 4 * n_in:  # oneDNN is twice as fast on the wide side's transpose
        dw = _product(x_rows.t(), dy_rows.t()).t().contiguous()
    else:
        dw = _product(dy_rows.t(), x_rows.t())
    return dx, dw, dy_rows.sum(0) if has_bias else None


@CpuRef.impl(ops.linear, id="cpu_ref/onednn", why_not=_why_not, bwd=_backward)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    y = _product(_rows(x), weight, bias).view(*x.shape[:-1], weight.shape[0])
    return y, (x, weight, bias is not None)
