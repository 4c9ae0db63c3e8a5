"""swiglu (npu_swiglu), geglu (npu_geglu) and bias_gelu (npu_gelu, npu_fast_gelu).

torch's own gelu is not used, because torch_npu maps it to an operator that always computes the tanh form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, ops

from .device import Npu
from .tensors import add_bias, bias_gradient, reasons, refuses


def _swiglu_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx [..., 2h], and dbias [2h] (None without a bias), from dy [..., h]."""
    x, bias = residuals
    if not x.numel():
        return torch.zeros_like(x), None if bias is None else torch.zeros_like(bias)
    inner = add_bias(x, bias)
    dx = torch.ops.npu.npu_swiglu_backward(dy.contiguous().to(inner.dtype), inner, -1)
    return dx.to(x.dtype), bias_gradient(dx, bias)


@Npu.impl(ops.swiglu, id="npu/swiglu", why_not=refuses(ops.swiglu), bwd=_swiglu_bwd)
def swiglu(x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    if not x.numel():
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2)), (x, bias)
    return torch.ops.npu.npu_swiglu(add_bias(x, bias), -1).to(x.dtype), (x, bias)


def _why_not_geglu(call: Call) -> Sequence[str]:
    if call.approximate == "fast":
        return ["approximate='fast' (npu_geglu has none and tanh)"]
    return reasons(call.x, call.bias)


def _geglu_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx [..., 2h], and dbias [2h] (None without a bias), from dy [..., h]."""
    x, bias, gelu, approximate = residuals
    if not x.numel():
        return torch.zeros_like(x), None if bias is None else torch.zeros_like(bias)
    inner = add_bias(x, bias)
    tanh = int(approximate == "tanh")
    dx = torch.ops.npu.npu_geglu_grad(dy.contiguous().to(inner.dtype), inner, gelu, -1, tanh, True)
    return dx.to(x.dtype), bias_gradient(dx, bias)


@Npu.impl(ops.geglu, id="npu/geglu", why_not=_why_not_geglu, bwd=_geglu_bwd)
def geglu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    if not x.numel():
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2)), (x, bias, x, approximate)
    # HAL applies gelu to the first half, whereas Ascend's default is the second half.
    y, gelu = torch.ops.npu.npu_geglu(add_bias(x, bias), -1, int(approximate == "tanh"), True)
    return y.to(x.dtype), (x, bias, gelu, approximate)


def _why_not_geglu_fast(call: Call) -> Sequence[str]:
    if call.approximate != "fast":
        return [f"approximate={call.approximate!r} (npu_fast_gelu has one form)"]
    return reasons(call.x, call.bias)


def _geglu_fast_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx [..., 2h], and dbias [2h] (None without a bias), from dy [..., h]."""
    x, bias = residuals
    if not x.numel():
        return torch.zeros_like(x), None if bias is None else torch.zeros_like(bias)
    a, b = add_bias(x, bias).float().chunk(2, dim=-1)
    a, dy = a.contiguous(), dy.float()
    da = torch.ops.npu.npu_fast_gelu_backward(dy * b, a)
    dx = torch.cat((da, dy * torch.ops.npu.npu_fast_gelu(a)), dim=-1)
    return dx.to(x.dtype), bias_gradient(dx, bias)


@Npu.impl(ops.geglu, id="npu/fast_gelu", why_not=_why_not_geglu_fast, bwd=_geglu_fast_bwd)
def geglu_fast(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
    if not x.numel():
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2)), (x, bias)
    a, b = add_bias(x, bias).float().chunk(2, dim=-1)
    return (torch.ops.npu.npu_fast_gelu(a.contiguous()) * b).to(x.dtype), (x, bias)


def _gelu_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx like x [..., h], and dbias [h] (None without a bias), from dy [..., h]."""
    x, bias, approximate = residuals
    if not x.numel():
        return torch.zeros_like(x), None if bias is None else torch.zeros_like(bias)
    inner = add_bias(x, bias)
    dy = dy.contiguous().to(inner.dtype)
    if approximate == "fast":
        dx = torch.ops.npu.npu_fast_gelu_backward(dy, inner)
    else:
        dx = torch.ops.npu.npu_gelu_backward(dy, inner, approximate=approximate)
    return dx.to(x.dtype), bias_gradient(dx, bias)


@Npu.impl(ops.bias_gelu, id="npu/gelu", why_not=refuses(ops.bias_gelu), bwd=_gelu_bwd)
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    if not x.numel():
        return torch.empty_like(x), (x, bias, approximate)
    inner = add_bias(x, bias)
    if approximate == "fast":
        y = torch.ops.npu.npu_fast_gelu(inner)
    else:
        y = torch.ops.npu.npu_gelu(inner, approximate=approximate)
    return y.to(x.dtype), (x, bias, approximate)
