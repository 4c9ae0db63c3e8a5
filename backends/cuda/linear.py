"""linear, and the sum of its weights' gradients, by torch, which calls cuBLAS: sums are float32 for every dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import ops

from .device import Cuda
from .tensors import reasons


def _why_not(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[str]:
    return reasons(x, weight, bias)


@Cuda.impl(ops.linear, id="cuda/torch", why_not=_why_not)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _why_not_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> Sequence[str]:
    return reasons(x, dy, main_grad, main_bias_grad)


@Cuda.impl(ops.linear_wgrad, id="cuda/torch", why_not=_why_not_wgrad)
def linear_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> None:
    ops.linear_wgrad.reference(x, dy, main_grad, main_bias_grad)
