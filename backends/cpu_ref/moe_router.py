"""moe_router (kernels/moe_router.c); moe_balance_sums and moe_drop by torch's operators."""

from __future__ import annotations

from torch import Tensor

from hal import ContractError, ops
from hal.backend_tools import RouterSpec, router_from

from .build import lib
from .device import CpuRef
from .tensors import CODE, REAL, addresses, parameter, refuses


def _forward(
    logits: Tensor, bias: Tensor | None, probs: Tensor, indices: Tensor, given: bool, spec: RouterSpec
) -> None:
    """Writes probs [t, k] and, unless they are `given`, indices [t, k] for logits [t, e] and bias [e]."""
    bias = None if bias is None else parameter(bias, REAL[logits.dtype])
    if not lib("moe").hal_moe_router_fwd(
        CODE[logits.dtype],
        spec.selection,
        spec.probability,
        *addresses(logits, bias),
        given,
        *addresses(probs, indices),
        *logits.shape,
        spec.topk,
        spec.groups,
        spec.group_topk,
        spec.scale,
    ):
        raise ContractError(f"moe_router: expected indices of {logits.shape[1]} experts; found others")


def _backward(logits: Tensor, indices: Tensor, dprobs: Tensor, dlogits: Tensor, spec: RouterSpec) -> None:
    """Writes dlogits [t, e] for dprobs [t, k]."""
    lib("moe").hal_moe_router_bwd(
        CODE[logits.dtype],
        spec.probability,
        *addresses(logits, indices, dprobs, dlogits),
        *logits.shape,
        spec.topk,
        spec.scale,
    )


moe_router, _bwd = router_from(_forward, _backward)
CpuRef.impl(ops.moe_router, id="cpu_ref/c", why_not=refuses(ops.moe_router, "logits", "expert_bias"), bwd=_bwd)(
    moe_router
)
for op, differentiated in ((ops.moe_balance_sums, "logits"), (ops.moe_drop, "probs")):
    CpuRef.impl(op, id="cpu_ref/torch", why_not=refuses(op, differentiated))(op.reference)
