"""Ops for which Ascend has no operator of their own: their formula, on torch_npu's operators, on the device.

The formula is the op's readable definition in hal.ops; gradients are torch's. Random bits are Philox computed on the
device in int64 arithmetic, so dropout masks are those of every other backend; Ascend's own generators differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import Comm, Rng, ops

from .device import Npu
from .tensors import reasons


def _why_not_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Sequence[str]:
    if device is not None and torch.device(device).type != "npu":
        return [f"device {device} (npu draws into the NPU's memory)"]
    return ()


@Npu.impl(ops.philox_uniform, id="npu/torch", why_not=_why_not_uniform)
def philox_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    return ops.philox_uniform.reference(shape, rng, device=device)


def _why_not_dropout(x: Tensor, p: float, rng: Rng | None) -> Sequence[str]:
    return reasons(x)


@Npu.impl(ops.dropout, id="npu/torch", why_not=_why_not_dropout)
def dropout(x: Tensor, p: float, rng: Rng | None) -> Tensor:
    return ops.dropout.reference(x, p, rng)


def _why_not_bda(
    x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float = 0.0, rng: Rng | None = None
) -> Sequence[str]:
    return reasons(x, bias, residual)


@Npu.impl(ops.bias_dropout_add, id="npu/torch", why_not=_why_not_bda)
def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float = 0.0, rng: Rng | None = None
) -> Tensor:
    return ops.bias_dropout_add.reference(x, bias, residual, p=p, rng=rng)


def _why_not_cross_entropy(
    logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, vocab_start: int = 0, comm: Comm | None = None
) -> Sequence[str]:
    return reasons(logits)


@Npu.impl(ops.cross_entropy, id="npu/torch", why_not=_why_not_cross_entropy)
def cross_entropy(
    logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, vocab_start: int = 0, comm: Comm | None = None
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
