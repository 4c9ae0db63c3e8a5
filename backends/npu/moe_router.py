"""moe_router by npu_moe_gating_top_k_softmax_v2 for a softmax over all experts; everything else by torch's operators.

The vendor's operator for sigmoid scores (npu_moe_gating_top_k) sums the two largest scores of a group whatever topk is,
which is another choice than megatron-core's except for topk = 2 * group_topk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, ops
from hal.backend_tools import with_signature_of

from .composed import ID
from .constraints import CONSTRAINTS
from .device import Npu
from .tensors import reasons, refuses


def _why_not(call: Call) -> Sequence[str]:
    refusals = reasons(call.logits)
    if call.score_function != "softmax":
        refusals.append(f"{call.score_function} scores (npu_moe_gating_top_k_softmax_v2 computes the softmax)")
    if call.num_groups is not None:
        refusals.append("groups of experts (npu_moe_gating_top_k_softmax_v2 has none)")
    if call.indices is not None:
        refusals.append("prescribed experts (npu_moe_gating_top_k_softmax_v2 chooses them)")
    return refusals + CONSTRAINTS["moe.top_k"].refusal("experts per token", call.topk)


def _backward(residuals: tuple[Any, ...], dprobs: Tensor) -> tuple[Tensor]:
    """dlogits [t, e] from dprobs [t, k], through the reference for the same experts."""
    logits, indices, pre_softmax, scale = residuals
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        probs, _ = ops.moe_router.reference(
            leaf, indices.shape[1], pre_softmax=pre_softmax, scaling_factor=scale, indices=indices
        )
    return torch.autograd.grad(probs, leaf, dprobs)


@Npu.impl(ops.moe_router, id="npu/gating_top_k_softmax", why_not=_why_not, bwd=_backward)
@with_signature_of(ops.moe_router)
def moe_router(
    logits: Tensor, topk: int, pre_softmax: bool, scaling_factor: float
) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
    # In float32, so that probabilities are rounded once, after they are scaled.
    probs, experts, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(
        logits.float().contiguous(), k=topk, renorm=0 if pre_softmax else 1
    )
    chosen = experts.to(torch.int64)
    return ((probs * scaling_factor).to(logits.dtype), chosen), (logits, chosen, pre_softmax, scaling_factor)


Npu.impl(ops.moe_router, id=ID, why_not=refuses(ops.moe_router, "logits"))(ops.moe_router.reference)
Npu.impl(ops.moe_balance_sums, id=ID, why_not=refuses(ops.moe_balance_sums))(ops.moe_balance_sums.reference)
Npu.impl(ops.moe_drop, id=ID, why_not=refuses(ops.moe_drop, "probs"))(ops.moe_drop.reference)
