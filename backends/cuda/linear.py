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


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (float32) += a b (16 bits), rounded nowhere between."""
    torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)


_tried: dict[torch.device, bool] = {}
"""Whether `_add_product` works on a device."""


def _adds_in_float32(device: torch.device) -> bool:
    """Tries it on the device's first call: torch has a kernel for it on GPUs, and not in every version. A graph that is
    being captured cannot wait for an answer."""
    if device not in _tried:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
            total = torch.ones(16, 16, device=device)
            _add_product(total, ones, ones)
            _tried[device] = bool((total == 17.0).all())
        except (AttributeError, RuntimeError):
            _tried[device] = False
    return _tried[device]


def _why_not_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> Sequence[str]:
    return reasons(x, dy, main_grad, main_bias_grad)


@Cuda.impl(ops.linear_wgrad, id="cuda/torch", why_not=_why_not_wgrad)
def linear_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> None:
    rounded_once = launch.simulated() or main_grad.dtype == x.dtype or not x.numel() or not dy.numel()
    if rounded_once or not _adds_in_float32(x.device):
        ops.linear_wgrad.reference(x, dy, main_grad, main_bias_grad)
        return
    rows, dy_rows = x.detach().reshape(-1, x.shape[-1]), dy.detach().reshape(-1, dy.shape[-1])
    _add_product(main_grad.detach(), dy_rows.t(), rows)
    if main_bias_grad is not None:
        main_bias_grad.detach().add_(dy_rows.sum(0, dtype=main_bias_grad.dtype))
