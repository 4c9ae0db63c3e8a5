"""moe_router (kernels/moe_router.c); moe_balance_sums and moe_drop by torch's operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ContractError, address, ops

from .build import lib
from .device import CpuRef
from .tensors import CODE, REAL, parameter, refuses

_LOGITS, _SIGMOID, _SOFTMAX = range(3)
"""The values whose largest are chosen (`selection` in the kernel)."""

_OF_CHOSEN, _OF_ALL, _SIGMOIDS, _NORMALISED_SIGMOIDS = range(4)
"""`probability` in the kernel."""


def _probability(score_function: str, pre_softmax: bool, topk: int) -> int:
    if score_function == "softmax":
        return _OF_ALL if pre_softmax else _OF_CHOSEN
    if topk == 1:
        return _SIGMOIDS
    return _NORMALISED_SIGMOIDS if score_function == "sigmoid" else _OF_ALL


def _selection(score_function: str, pre_softmax: bool, grouped: bool, biased: bool) -> int:
    """Without groups and bias, every score function keeps the order of the logits."""
    if not (grouped or biased):
        return _LOGITS
    return _SIGMOID if score_function == "sigmoid" else _SOFTMAX if pre_softmax else _LOGITS


def _backward(residuals: tuple[Any, ...], dprobs: Tensor) -> tuple[Tensor]:
    """dlogits [t, e] from dprobs [t, k]."""
    logits, indices, probability, scale = residuals
    dprobs, dlogits = dprobs.contiguous(), torch.empty_like(logits)
    if logits.numel():
        lib().hal_moe_router_bwd(
            CODE[logits.dtype],
            probability,
            logits.data_ptr(),
            indices.data_ptr(),
            dprobs.data_ptr() or address(dprobs),
            dlogits.data_ptr(),
            *logits.shape,
            indices.shape[1],
            scale,
        )
    return (dlogits,)


@CpuRef.impl(ops.moe_router, id="cpu_ref/c", why_not=refuses(ops.moe_router, "logits", "expert_bias"), bwd=_backward)
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
    if score_function == "sinkhorn" and indices is None:
        # Its iteration over all tokens is a few passes of torch's; only the choice is taken from it.
        indices = ops.moe_router.reference(logits, topk, score_function=score_function)[1]
    given = indices is not None
    chosen = torch.empty((len(logits), topk), dtype=torch.int64) if indices is None else indices.clone()
    chosen = chosen.contiguous()
    bias = None if expert_bias is None else parameter(expert_bias, REAL[logits.dtype])
    probs = torch.empty(chosen.shape, dtype=logits.dtype)
    probability = _probability(score_function, pre_softmax, topk)
    if logits.numel() and not lib().hal_moe_router_fwd(
        CODE[logits.dtype],
        _selection(score_function, pre_softmax, num_groups is not None, bias is not None),
        probability,
        logits.data_ptr() or address(logits),
        address(bias),
        given,
        probs.data_ptr() or address(probs),
        chosen.data_ptr() or address(chosen),
        *logits.shape,
        topk,
        num_groups or 0,
        group_topk or 0,
        scaling_factor,
    ):
        raise ContractError(f"moe_router: expected indices of {logits.shape[1]} experts; found others")
    return (probs, chosen), (logits, chosen, probability, scaling_factor)


CpuRef.impl(ops.moe_balance_sums, id="cpu_ref/torch", why_not=refuses(ops.moe_balance_sums))(
    ops.moe_balance_sums.reference
)
CpuRef.impl(ops.moe_drop, id="cpu_ref/torch", why_not=refuses(ops.moe_drop, "probs"))(ops.moe_drop.reference)
