"""layer_norm (native_layer_norm) and rms_norm (npu_rms_norm)."""

from __future__ import annotations

import torch
from torch import Tensor

from hal import ops

from .device import Npu
from .tensors import refuses


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


def _rms_norm_bwd(residuals: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx like x and dweight [width], from dy like x."""
    x, weight, rstd = residuals
    if not x.numel():
        return torch.zeros_like(x), torch.zeros_like(weight)
    dx, dw = torch.ops.npu.npu_rms_norm_backward(dy.contiguous(), x, weight, rstd)
    return dx, dw.to(weight.dtype)


@Npu.impl(ops.rms_norm, id="npu/rms_norm", why_not=refuses(ops.rms_norm), bwd=_rms_norm_bwd)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Tensor, ...]]:
    x, weight = x.contiguous(), weight.contiguous()
    if not x.numel():
        return torch.empty_like(x), (x, weight, x)
    y, rstd = torch.ops.npu.npu_rms_norm(x, weight, eps)
    return y.to(x.dtype), (x, weight, rstd)
