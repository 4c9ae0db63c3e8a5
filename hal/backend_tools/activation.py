"""Builds swiglu, geglu and bias_gelu from one function that implements all kinds of activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Activation = Callable[..., tuple[Tensor, tuple[Any, ...]]]


def activations_from(
    forward: Callable[[Tensor, Tensor | None, str, bool], tuple[Tensor, tuple[Any, ...]]],
) -> tuple[Activation, Activation, Activation]:
    """The forward functions of ops.swiglu, ops.geglu and ops.bias_gelu, for `Backend.impl`.

    forward(x, bias, kind, gated): (activation of x + bias, residuals). kind: "silu", or gelu as its op's `approximate`
    names it ("none", "tanh", "fast"). gated: the activation of the first half of x + bias, times the second half.
    """

    def swiglu(x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
        return forward(x, bias, "silu", True)

    def geglu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
        return forward(x, bias, approximate, True)

    def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> tuple[Tensor, tuple[Any, ...]]:
        return forward(x, bias, approximate, False)

    return swiglu, geglu, bias_gelu
