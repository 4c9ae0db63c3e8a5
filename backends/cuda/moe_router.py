"""moe_router (kernels/moe.cu); Sinkhorn's algorithm, moe_balance_sums and moe_drop by torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, ops

from . import launch
from .device import Cuda
from .tensors import TYPE, reasons, refuses

_LOGITS, _SIGMOID, _SOFTMAX = range(3)
"""The values whose largest are chosen (`selection` in the kernel)."""

_OF_CHOSEN, _OF_ALL, _SIGMOIDS, _NORMALISED_SIGMOIDS = range(4)
"""`probability` in the kernel."""


def _shared(experts: int, groups: int, topk: int) -> int:
    return 4 * (3 * experts + groups + 2 * topk)


def _why_not(call: Call) -> Sequence[str]:
    refusals = list(reasons(call.logits, call.expert_bias))
    if call.score_function == "sinkhorn":
        refusals.append("sinkhorn (the kernel handles one token at a time)")
    experts = call.logits.shape[1]
    if _shared(experts, call.num_groups or 0, call.topk) > launch.shared_memory():
        refusals.append(f"{experts} experts (their scores exceed the shared memory of a block)")
    return refusals


def _probability(score_function: str, pre_softmax: bool, topk: int) -> int:
    if score_function == "softmax":
        return _OF_ALL if pre_softmax else _OF_CHOSEN
    return _SIGMOIDS if topk == 1 else _NORMALISED_SIGMOIDS


def _backward(residuals: tuple[Any, ...], dprobs: Tensor) -> tuple[Tensor]:
    """dlogits [t, e] from dprobs [t, k]."""
    logits, indices, probability, scale = residuals
    dprobs, dlogits = dprobs.contiguous(), torch.empty_like(logits)
    if logits.numel():
        launch.run(
            f"router_bwd<{TYPE[logits.dtype]}>",
            (launch.blocks(len(logits)), 1),
            32,
            logits,
            indices,
            dprobs,
            dlogits,
            float(scale),
            probability,
            *logits.shape,
            indices.shape[1],
            shared=_shared(logits.shape[1], 0, indices.shape[1]),
        )
    return (dlogits,)


@Cuda.impl(ops.moe_router, id="cuda/kernel", why_not=_why_not, bwd=_backward)
def moe_router(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    expert_bias: Tensor | None = None,
    indices: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
    logits = logits.contiguous()
    shape = (len(logits), topk)
    chosen = (
        torch.empty(shape, dtype=torch.int64, device=logits.device)
        if indices is None
        else indices.clone(memory_format=torch.contiguous_format)
    )
    bias = None if expert_bias is None else expert_bias.contiguous()
    # Without groups and bias, every score function keeps the order of the logits.
    selection = _LOGITS
    if num_groups is not None or bias is not None:
        selection = _SIGMOID if score_function == "sigmoid" else _SOFTMAX if pre_softmax else _LOGITS
    probability = _probability(score_function, pre_softmax, topk)
    probs = torch.empty(shape, dtype=logits.dtype, device=logits.device)
    if logits.numel():
        launch.run(
            f"router_fwd<{TYPE[logits.dtype]}>",
            (launch.blocks(len(logits)), 1),
            32,
            logits,
            bias,
            probs,
            chosen,
            float(scaling_factor),
            selection,
            probability,
            int(indices is not None),
            *logits.shape,
            topk,
            num_groups or 0,
            group_topk or 0,
            shared=_shared(logits.shape[1], num_groups or 0, topk),
        )
    return (probs, chosen), (logits, chosen, probability, scaling_factor)


Cuda.impl(ops.moe_router, id="cuda/torch", why_not=refuses(ops.moe_router, "logits", "expert_bias"))(
    ops.moe_router.reference
)
Cuda.impl(ops.moe_balance_sums, id="cuda/torch", why_not=refuses(ops.moe_balance_sums))(ops.moe_balance_sums.reference)
Cuda.impl(ops.moe_drop, id="cuda/torch", why_not=refuses(ops.moe_drop, "probs"))(ops.moe_drop.reference)
