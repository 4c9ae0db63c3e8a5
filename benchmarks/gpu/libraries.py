"""Peers of `make gpu` from other libraries, where they are installed: Liger, TransformerEngine and flash-attn.

Most are functions of the tensors that HAL's op takes. (Liger's gated activations and cross entropy write gradients over
their inputs, so values are compared before anything is timed.) Each imports its library in its first call, so that one
that is missing or does not work here is an absent peer with the reason, like every other peer.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

EPS = 1e-5


def _liger() -> Any:
    return import_module("liger_kernel.transformers.functional")


def transformer_engine(kind: str, *weights: Tensor) -> Callable[[], Any]:
    """Makes TransformerEngine's module LayerNorm or RMSNorm with copies of these weights as its parameters."""

    def make() -> Any:
        te = import_module("transformer_engine.pytorch")
        module = getattr(te, kind)(weights[0].numel(), eps=EPS, params_dtype=weights[0].dtype).to(weights[0].device)
        for parameter, weight in zip(module.parameters(), weights):
            parameter.data.copy_(weight)
        return module

    return make


def layer_norm() -> dict[str, Callable[..., Any]]:
    """Functions of x, weight, bias."""
    return {"Liger": lambda x, w, b: _liger().liger_layer_norm(x, w, b, EPS)}


def rms_norm() -> dict[str, Callable[..., Any]]:
    """Functions of x, weight."""
    # in_place=False: its backward pass would otherwise write over the gradient that it is given.
    return {"Liger": lambda x, w: _liger().liger_rms_norm(x, w, EPS, in_place=False)}


def swiglu() -> dict[str, Callable[..., Any]]:
    """Functions of x [..., 2h], whose first half is gated."""
    return {"Liger": lambda x: _liger().liger_swiglu(*x.chunk(2, -1))}


def geglu() -> dict[str, Callable[..., Any]]:
    """Functions of x [..., 2h], whose first half goes through gelu; Liger's is the tanh approximation."""
    return {"Liger (tanh)": lambda x: _liger().liger_geglu(*x.chunk(2, -1))}


def cross_entropy(target: Tensor) -> dict[str, Callable[..., Any]]:
    """Functions of the logits [rows, vocabulary]: the loss of every row."""
    return {"Liger": lambda z: _liger().liger_cross_entropy(z, target, reduction="none")}


def attention(window: int | None = None) -> dict[str, Callable[..., Any]]:
    """Functions of q, k, v [b, n, s, d]: causal attention."""

    def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        flash_attn_func = import_module("flash_attn").flash_attn_func
        rows = (x.transpose(1, 2) for x in (q, k, v))
        sides = (-1, -1) if window is None else (window, 0)
        return flash_attn_func(*rows, causal=True, window_size=sides).transpose(1, 2)

    return {"flash-attn": flash_attn}
