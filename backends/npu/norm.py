"""layer_norm (native_layer_norm), rms_norm (npu_rms_norm) and add_rms_norm (npu_add_rms_norm)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import Call, ops

from .device import Npu
from .tensors import reasons, refuses


def _layer_norm_bwd(residuals: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx like x, dweight and dbias [width], from dy like x."""
    x, weight, bias, mean, rstd = residuals
    if not x.numel():
        return torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
    shape = [x.shape[-1]]
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        dy.contiguous(), x, shape, mean, rstd, weight, bias, [True, True, True]
    )
    return dx, dw.to(weight.dtype), db.to(bias.dtype)


@Npu.impl(ops.layer_norm, id="npu/native", why_not=refuses(ops.layer_norm), bwd=_layer_norm_bwd)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Tensor, ...]]:
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    if not x.numel():
        return torch.empty_like(x), (x, weight, bias, x, x)
    y, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
    return y, (x, weight, bias, mean, rstd)


def _gamma(x: Tensor, weight: Tensor) -> Tensor:
    """weight in a dtype that the operator takes beside x: that of x, or float32."""
    return weight if weight.dtype == x.dtype else weight.float()


def _rms_norm_bwd(residuals: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx like x and dweight [width], from dy like x."""
    x, weight, rstd = residuals
    if not x.numel():
        return torch.zeros_like(x), torch.zeros_like(weight)
    dx, dw = torch.ops.npu.npu_rms_norm_backward(dy.contiguous(), x, _gamma(x, weight), rstd)
    return dx, dw.to(weight.dtype)


@Npu.impl(ops.rms_norm, id="npu/rms_norm", why_not=refuses(ops.rms_norm), bwd=_rms_norm_bwd)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Tensor, ...]]:
    x, weight = x.contiguous(), weight.contiguous()
    if not x.numel():
        return torch.empty_like(x), (x, weight, x)
    y, rstd = torch.ops.npu.npu_rms_norm(x, _gamma(x, weight), eps)
    return y.to(x.dtype), (x, weight, rstd)


def _why_not_add(call: Call) -> Sequence[str]:
    if call.weight.dtype != call.x.dtype:
        return [f"weight of dtype {call.weight.dtype} beside x of {call.x.dtype} (aclnnAddRmsNorm takes one dtype)"]
    return reasons(call.x, call.residual, call.weight)


def _add_rms_norm_bwd(residuals: tuple[Tensor, ...], dy: Tensor, dtotal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx and dresidual, which are equal, and dweight [width], from dy and the gradient of the sum, both like x."""
    dx, dweight = _rms_norm_bwd(residuals, dy)
    dx = dx + dtotal
    return dx, dx, dweight


@Npu.impl(ops.add_rms_norm, id="npu/add_rms_norm", why_not=_why_not_add, bwd=_add_rms_norm_bwd)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    weight = weight.contiguous()
    if not x.numel():
        y, total = torch.empty_like(x), torch.empty_like(x)
        return (y, total), (total, weight, y)
    y, rstd, total = torch.ops.npu.npu_add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
    return (y, total), (total, weight, rstd)
