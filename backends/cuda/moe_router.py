"""moe_router (kernels/moe.cu); Sinkhorn's algorithm, moe_balance_sums and moe_drop by torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hal import Call, ops
from hal.backend_tools import RouterSpec, router_from

from . import launch
from .device import Cuda
from .tensors import TYPE, reasons, refuses


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


def _run(kernel: str, logits: Tensor, groups: int, topk: int, *arguments: Any) -> None:
    """Launches a kernel with one warp per token of logits [t, e]."""
    launch.run(
        f"{kernel}<{TYPE[logits.dtype]}>",
        (launch.blocks(len(logits)), 1),
        32,
        logits,
        *arguments,
        shared=_shared(logits.shape[1], groups, topk),
    )


def _forward(
    logits: Tensor, bias: Tensor | None, probs: Tensor, indices: Tensor, given: bool, spec: RouterSpec
) -> None:
    """Writes probs [t, k] and, unless they are `given`, indices [t, k] for logits [t, e] and bias [e]."""
    numbers = spec.scale, spec.selection, spec.probability, int(given), *logits.shape
    sizes = spec.topk, spec.groups, spec.group_topk
    _run("router_fwd", logits, spec.groups, spec.topk, bias, probs, indices, *numbers, *sizes)


def _backward(logits: Tensor, indices: Tensor, dprobs: Tensor, dlogits: Tensor, spec: RouterSpec) -> None:
    """Writes dlogits [t, e] for dprobs [t, k]."""
    numbers = spec.scale, spec.probability, *logits.shape, spec.topk
    _run("router_bwd", logits, 0, spec.topk, indices, dprobs, dlogits, *numbers)


moe_router, _bwd = router_from(_forward, _backward)
Cuda.impl(ops.moe_router, id="cuda/kernel", why_not=_why_not, bwd=_bwd)(moe_router)
Cuda.impl(ops.moe_router, id="cuda/torch", why_not=refuses(ops.moe_router, "logits", "expert_bias"))(
    ops.moe_router.reference
)
Cuda.impl(ops.moe_balance_sums, id="cuda/torch", why_not=refuses(ops.moe_balance_sums))(ops.moe_balance_sums.reference)
Cuda.impl(ops.moe_drop, id="cuda/torch", why_not=refuses(ops.moe_drop, "probs"))(ops.moe_drop.reference)
