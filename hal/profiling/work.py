"""Floating-point operations and bytes of a call, from its arguments: what a roofline needs.

Only products count as operations (a multiplication and an addition each); other ops are bound by memory. Bytes are
those that an ideal kernel moves, which reads every input once and writes every output once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.ops.layouts import sizes

from ..core.call import Call


def bytes_of(values: Iterable[Any]) -> int:
    """Bytes of the tensors among `values`, lists and tuples included."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, (list, tuple)):
            total += bytes_of(value)
    return total


def forward_flops(op: str, call: Call) -> float:
    """Operations of a call's forward pass; 0 for an op without products, or whose sizes only the device knows."""
    count = _PRODUCTS.get(op)
    return 0.0 if count is None else count(call)


def backward_flops(op: str, forward: float, gradients: int) -> float:
    """Operations of the backward pass, given those of the forward pass and the number of gradients of matrices that it
    returned. A linear layer has one product per gradient, attention has five where its forward pass has two."""
    if op == "flash_attention":
        return 2.5 * forward
    return forward * min(gradients, 2)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.numel() else 0


def _linear(call: Any) -> float:
    return 2.0 * _rows(call.x) * int(call.x.shape[-1]) * int(call.weight.shape[-2])


def _wgrad(call: Any) -> float:
    return 2.0 * _rows(call.x) * int(call.x.shape[-1]) * int(call.dy.shape[-1])


def _attention(call: Any) -> float:
    if call.layout == "TND":
        return 0.0  # the lengths are on the device, and reading them would wait for it
    kv_heads = call.num_kv_heads or call.num_heads
    b, n, sq, d = sizes(call.q, call.layout, call.num_heads)
    skv, v = sizes(call.k, call.layout, kv_heads)[2], sizes(call.v, call.layout, kv_heads)[3]
    return 2.0 * b * n * visible_pairs(sq, skv, call.pre_tokens, call.next_tokens) * (d + v)


@functools.lru_cache
def visible_pairs(sq: int, skv: int, pre: int | None, next_: int | None) -> int:
    """(query, key) pairs inside a window that is aligned at the last query and key."""
    at = torch.arange(sq) + (skv - sq)
    first = torch.zeros_like(at) if pre is None else (at - pre).clamp(min=0)
    last = torch.full_like(at, skv - 1) if next_ is None else (at + next_).clamp(max=skv - 1)
    return int((last - first + 1).clamp(min=0).sum())


_PRODUCTS: dict[str, Callable[[Any], float]] = {
    "linear": _linear,
    "linear_wgrad": _wgrad,
    "grouped_linear": _linear,
    "grouped_linear_wgrad": _wgrad,
    "scaled_linear": _linear,
    "linear_bias_activation": _linear,
    "linear_cross_entropy": _linear,
    "flash_attention": _attention,
}
"""Operations by op name; an op that is not listed has no products."""


def matrices(gradients: Sequence[Any]) -> int:
    """The number of gradients of at least two dimensions: those of inputs and weights, not those of biases."""
    return sum(isinstance(g, Tensor) and g.ndim >= 2 for g in gradients)
