"""Ops for which Ascend has no operator of their own: their formula, on torch_npu's operators, on the device.

The formula is the op's readable definition in hal.ops; gradients are torch's. Of flash_attention it takes what the
fused operator does not (dropout of packed sequences, sizes beyond its limits), and forms the matrix of scores for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hal import Comm, Rng, ops

from .device import Npu
from .tensors import reasons


def _why_not_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    vocab_start: int = 0,
    comm: Comm | None = None,
    inplace_backward: bool = False,
) -> Sequence[str]:
    return reasons(logits)


@Npu.impl(ops.cross_entropy, id="npu/torch", why_not=_why_not_cross_entropy)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    vocab_start: int = 0,
    comm: Comm | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    return ops.cross_entropy.reference(
        logits, target, label_smoothing=label_smoothing, vocab_start=vocab_start, comm=comm
    )


def _why_not_embedding(weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None) -> Sequence[str]:
    return reasons(weight)


@Npu.impl(ops.embedding, id="npu/torch", why_not=_why_not_embedding)
def embedding(weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None) -> Tensor:
    return ops.embedding.reference(weight, ids, vocab_start=vocab_start, comm=comm)


def _why_not_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[str]:
    return reasons(x, weight, bias)


@Npu.impl(ops.linear, id="npu/torch", why_not=_why_not_linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.linear.reference(x, weight, bias)


def _why_not_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> Sequence[str]:
    return reasons(x, dy, main_grad, main_bias_grad)


@Npu.impl(ops.linear_wgrad, id="npu/torch", why_not=_why_not_wgrad)
def linear_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> None:
    ops.linear_wgrad.reference(x, dy, main_grad, main_bias_grad)


def _why_not_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    pre_tokens: int | None = None,
    next_tokens: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Sequence[str]:
    if not q.numel():
        batch = 1 if layout == "TND" else q.shape[layout.index("B")]
        heads = num_heads if layout.endswith("H") else q.shape[layout.index("N")]
        if batch == heads == 1:
            return ["one head without queries (torch_npu's matmul cannot differentiate a product without rows)"]
    return reasons(q)


@Npu.impl(ops.flash_attention, id="npu/torch", why_not=_why_not_attention)
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    pre_tokens: int | None = None,
    next_tokens: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    return ops.flash_attention.reference(
        q,
        k,
        v,
        layout=layout,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        mask=mask,
        scale=scale,
        dropout_p=dropout_p,
        rng=rng,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        return_lse=return_lse,
    )
