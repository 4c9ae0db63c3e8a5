"""linear and linear_wgrad by torch, which calls cuBLAS: products are summed in float32 for every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from hal import ops

from . import launch
from .device import Cuda
from .tensors import refuses


@Cuda.impl(ops.linear, id="cuda/torch", why_not=refuses(ops.linear))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [m, n] (float32) += a [m, k] b [k, n] (16 bits), without rounding the product."""
    torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)


_add_product_works: dict[torch.device, bool] = {}
"""Whether `_add_product` works on a device, once it has been tried."""


def _adds_in_float32(device: torch.device) -> bool:
    """Whether `_add_product` works on this device; tried at its first call, because not every version of torch has it.
    The trial synchronises, so it is not made during graph capture."""
    if device not in _add_product_works:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
            total = torch.ones(16, 16, device=device)
            _add_product(total, ones, ones)
            _add_product_works[device] = bool((total == 17.0).all())
        except (AttributeError, RuntimeError):
            _add_product_works[device] = False
    return _add_product_works[device]


_refuses_wgrad = refuses(ops.linear_wgrad, "x", "dy", "main_grad", "main_bias_grad")


@Cuda.impl(ops.linear_wgrad, id="cuda/torch", why_not=_refuses_wgrad)
def linear_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> None:
    # The fallback rounds the product to x's dtype before adding it. This is exact for float32 and for empty products,
    # and the only possibility on the CPU.
    rounded_once = launch.simulated() or main_grad.dtype == x.dtype or not x.numel() or not dy.numel()
    if rounded_once or not _adds_in_float32(x.device):
        ops.linear_wgrad.reference(x, dy, main_grad, main_bias_grad)
        return
    rows, dy_rows = x.detach().reshape(-1, x.shape[-1]), dy.detach().reshape(-1, dy.shape[-1])
    _add_product(main_grad.detach(), dy_rows.t(), rows)
    if main_bias_grad is not None:
        main_bias_grad.detach().add_(dy_rows.sum(0, dtype=main_bias_grad.dtype))
