"""grouped_linear, grouped_linear_wgrad and grouped_swiglu.

Groups of a few rows are multiplied by a kernel (kernels/grouped_linear_kind.h), all in one parallel region; larger ones
one after the other by the products of linear.py. Weight gradients are the kernel of linear_wgrad for every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, ContractError, ops

from .build import lib
from .device import CpuRef
from .linear import fast, product_to
from .memory import empty
from .tensors import CODE, REAL, addresses, parameter, reasons, refuses

_FEW = 64
"""Up to this many rows, a group is multiplied by the kernel, which cannot take more."""


def _sizes(op: str, group_sizes: Tensor, rows: int) -> list[int]:
    """The sizes of the groups. Raises ContractError for sizes that do not fit, with which kernels would fail."""
    sizes: list[int] = group_sizes.tolist()
    if min(sizes, default=0) < 0 or sum(sizes) > rows:
        raise ContractError(f"{op}: expected group_sizes from 0 whose sum is at most {rows}; found {sizes}")
    return sizes


def _multiply(x: Tensor, weight: Tensor, group_sizes: Tensor, sizes: Sequence[int], *, transposed: bool) -> Tensor:
    """x [n, in] times the transposes of weight [e, out, in], or, transposed, x [n, out] times weight."""
    width = weight.shape[2] if transposed else weight.shape[1]
    y = empty((len(x), width), x.dtype)
    small = any(0 < size <= _FEW for size in sizes) and weight.numel() > 0 and fast(x.dtype)
    if small:
        x, weight, group_sizes = x.contiguous(), weight.contiguous(), group_sizes.contiguous()
        kernel = lib("moe").hal_grouped_linear_dx if transposed else lib("moe").hal_grouped_linear
        small = kernel(
            CODE[x.dtype],
            *addresses(x, weight, group_sizes, y),
            *weight.shape,
            _FEW,
        )
    start = 0
    for expert, size in enumerate(sizes):
        if size > (_FEW if small else 0):
            rows, to = x[start : start + size], y[start : start + size]
            matrix = weight[expert].t() if transposed else weight[expert]
            product_to(to, rows, matrix)
        start += size
    return y


def _linear_bwd(residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:
    """dx [n, in] and dweight [e, out, in] from dy [n, out], as far as `needs` requires them."""
    x, weight, group_sizes = residuals
    sizes = _sizes("grouped_linear", group_sizes, len(x))
    dx = _multiply(dy, weight, group_sizes, sizes, transposed=True) if needs[0] else None
    if not needs[1]:
        return dx, None
    if x.dtype == torch.float32 and _wgrad(x, dy, group_sizes, dw := empty(weight.shape, torch.float32), add=False):
        return dx, dw
    return dx, _weight_gradients(x, dy, group_sizes, sizes, weight)


def _weight_gradients(x: Tensor, dy: Tensor, group_sizes: Tensor, sizes: Sequence[int], weight: Tensor) -> Tensor:
    """dy^T x [e, out, in] of every group, in the dtype of weight [e, out, in]."""
    dw = empty(weight.shape, weight.dtype)
    small = any(size <= _FEW for size in sizes) and dw.numel() > 0 and fast(x.dtype)
    if small:
        x, dy, group_sizes = x.contiguous(), dy.contiguous(), group_sizes.contiguous()
        small = lib("moe").hal_grouped_linear_dw(CODE[x.dtype], *addresses(dy, x, group_sizes, dw), *dw.shape, _FEW)
    start = 0
    for expert, size in enumerate(sizes):
        if size > _FEW or not small:
            dy_rows, x_rows = dy[start : start + size], x[start : start + size]
            product_to(dw[expert], dy_rows.t(), x_rows.t())
        start += size
    return dw


def _wgrad(x: Tensor, dy: Tensor, group_sizes: Tensor, dw: Tensor, *, add: bool) -> bool:
    """dw [e, out, in] (float32, contiguous) (+)= dy^T x of every group; False if the kernel does not multiply them."""
    if not dw.numel() or not fast(x.dtype):
        return False
    x, dy, group_sizes = x.contiguous(), dy.contiguous(), group_sizes.contiguous()
    multiplied = lib("moe").hal_grouped_linear_wgrad(
        CODE[x.dtype],
        *addresses(dy, x, group_sizes, dw),
        *dw.shape,
        add,
    )
    return bool(multiplied)


@CpuRef.impl(ops.grouped_linear, id="cpu_ref/c", why_not=refuses(ops.grouped_linear), bwd=_linear_bwd)
def grouped_linear(x: Tensor, weight: Tensor, group_sizes: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    sizes = _sizes("grouped_linear", group_sizes, len(x))
    return _multiply(x, weight, group_sizes, sizes, transposed=False), (x, weight, group_sizes)


def _why_not_wgrad(call: Call) -> Sequence[str]:
    if not call.main_grad.is_contiguous():
        return ["a main_grad that is not contiguous (it is updated in place)"]
    return reasons(call.x, call.dy, call.main_grad)


@CpuRef.impl(ops.grouped_linear_wgrad, id="cpu_ref/c", why_not=_why_not_wgrad)
def grouped_linear_wgrad(x: Tensor, dy: Tensor, group_sizes: Tensor, main_grad: Tensor) -> None:
    sizes = _sizes("grouped_linear_wgrad", group_sizes, len(x))
    x, dy, main_grad = x.detach(), dy.detach(), main_grad.detach()
    if x.dtype == torch.float16:
        x, dy = x.float(), dy.float()
    if _wgrad(x, dy, group_sizes, main_grad, add=True):
        return
    start = 0
    for total, size in zip(main_grad, sizes):
        ops.linear_wgrad.reference(x[start : start + size], dy[start : start + size], total)
        start += size


def _swiglu_bwd(residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:
    """dx [n, 2h] and dprobs [n] from dy [n, h], as far as `needs` requires them."""
    x, probs = residuals
    dy, real = dy.contiguous(), REAL[x.dtype]
    weights = parameter(probs, real)
    dx = empty(x.shape, x.dtype) if needs[0] else None
    dprobs = torch.zeros(probs.shape, dtype=real) if needs[1] else None
    if x.numel():
        lib("moe").hal_grouped_swiglu_bwd(
            CODE[x.dtype],
            *addresses(x, weights, dy, dx, dprobs),
            *dy.shape,
        )
    return dx, None if dprobs is None else dprobs.to(probs.dtype)


@CpuRef.impl(ops.grouped_swiglu, id="cpu_ref/c", why_not=refuses(ops.grouped_swiglu), bwd=_swiglu_bwd)
def grouped_swiglu(x: Tensor, probs: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x = x.contiguous()
    weights = parameter(probs, REAL[x.dtype])
    y = empty((len(x), x.shape[1] // 2), x.dtype)
    if y.numel():
        lib("moe").hal_grouped_swiglu_fwd(
            CODE[x.dtype],
            *addresses(x, weights, y),
            *y.shape,
        )
    return y, (x, probs)
