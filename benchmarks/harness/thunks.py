"""The calls that most candidates measure: a function's forward pass, and its forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .case import Thunk


def forward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Thunk:
    """Calls `function` without autograd."""

    def call() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    return call


def forward_backward(function: Callable[..., Tensor], inputs: Sequence[Tensor], wanted: int) -> Thunk:
    """Calls `function`, then computes the gradients of the first `wanted` inputs (leaves) for a random output gradient.

    Calls the function once immediately to determine the shape of its output.
    """
    leaves = [x.requires_grad_() for x in inputs[:wanted]]
    dy = torch.randn_like(function(*inputs).detach())
    return lambda: torch.autograd.grad(function(*inputs), leaves, dy)
