"""linear, and the sum of its weights' gradients, by torch, which calls cuBLAS: sums are float32 for every dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import ops

from . import launch
from .device import Cuda
from .tensors import reasons


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[str]:
    return reasons(x, weight, bias)


@Cuda.impl(ops.linear, id="cuda/torch", why_not=_why_not)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


_adds_in_float32 = False
"""Whether `_add_product` works on the device (see `prepare`)."""


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (float32) += a b (16 bits), rounded nowhere between."""
    torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)


def prepare(device: torch.device) -> None:
    """Tries on a device whether torch adds products of 16-bit matrices to float32 sums in place.

    It has a kernel for that on GPUs only, so the simulator adds a rounded product.
    """
    global _adds_in_float32
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        _add_product(total, ones, ones)
    except (AttributeError, RuntimeError):  # a torch without this overload, or without a kernel for it
        _adds_in_float32 = False
    else:
        _adds_in_float32 = bool((total == 17.0).all())


def _why_not_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> Sequence[str]:
    return reasons(x, dy, main_grad, main_bias_grad)


@Cuda.impl(ops.linear_wgrad, id="cuda/torch", why_not=_why_not_wgrad)
def linear_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> None:
    if launch.simulated() or not _adds_in_float32 or main_grad.dtype == x.dtype or not x.numel() or not dy.numel():
        ops.linear_wgrad.reference(x, dy, main_grad, main_bias_grad)
        return
    rows, dy_rows = x.detach().reshape(-1, x.shape[-1]), dy.detach().reshape(-1, dy.shape[-1])
    _add_product(main_grad.detach(), dy_rows.t(), rows)
    if main_bias_grad is not None:
        main_bias_grad.detach().add_(dy_rows.sum(0, dtype=main_bias_grad.dtype))
