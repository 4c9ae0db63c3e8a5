"""flash_attention with dropout: forward by npu_fusion_attention with HAL's mask, backward by unfused operators.

The operator's forward pass takes a dropout mask. Its backward pass (npu_fusion_attention_grad, also _v2 and _v3) takes
the seed and offset of torch_npu's generator instead and redraws the mask, which differs from HAL's. Therefore gradients
are computed from the saved statistics with plain operators, which form the matrix of scores temporarily.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, ops
from hal.backend_tools import AttentionSpec, attention_spec, with_signature_of

from .. import random
from ..device import Npu
from .fusion import beyond_limits, dense_call, flat, out_shape, without_keys
from .fusion_call import lse_of, packed_bits


def _why_not(call: Call) -> Sequence[str]:
    spec = attention_spec(call)
    refusals = beyond_limits(spec, call.q)
    if spec.dropout_p == 0.0:
        refusals.append("no dropout (npu/fusion_attention takes it, backward pass included)")
    if spec.packed:
        refusals.append("dropout of packed sequences (HAL draws over all tokens, the library over each sequence)")
    return refusals


def _bwd(residuals: tuple[Any, ...], dy: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the layout of q, k and v: the softmax's gradient, with probabilities recomputed from lse [b, n,
    sq]."""
    q, k, v, mask, lse, spec = residuals
    layout, heads, kv_heads, scale, dropout_p = spec.layout, spec.heads, spec.kv_heads, spec.scale, spec.dropout_p
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group = spec.group
    q_BNQD, dy_BNQD = (ops.layouts.to_bnsd(x, layout, heads).float() for x in (q, dy))
    k_BNKD, v_BNKD = (ops.layouts.to_bnsd(x, layout, kv_heads).float().repeat_interleave(group, dim=1) for x in (k, v))
    p_BNQK = torch.exp((q_BNQD @ k_BNKD.transpose(-1, -2)) * scale - lse.unsqueeze(-1))
    for hidden in (mask, ops.band_mask(q_BNQD.shape[2], k_BNKD.shape[2], spec.pre, spec.next, q.device)):
        if hidden is not None:
            p_BNQK = p_BNQK.masked_fill(hidden, 0.0)
    keep_BNQK = random.keep_mask(p_BNQK.shape, dropout_p, spec.rng, q.device) * (1.0 / (1.0 - dropout_p))
    # With delta = rowsum(dP P), dS = P (dP - delta) scale; dropout applies to P in out = P V, and so to dP.
    dp_BNQK = (dy_BNQD @ v_BNKD.transpose(-1, -2)) * keep_BNQK
    ds_BNQK = p_BNQK * (dp_BNQK - (dp_BNQK * p_BNQK).sum(-1, keepdim=True)) * scale
    dk_BNKD = ds_BNQK.transpose(-1, -2) @ q_BNQD
    dv_BNKD = (p_BNQK * keep_BNQK).transpose(-1, -2) @ dy_BNQD
    grads = ds_BNQK @ k_BNKD, *(x.unflatten(1, (kv_heads, group)).sum(2) for x in (dk_BNKD, dv_BNKD))
    dq, dk, dv = (ops.layouts.from_bnsd(x, layout).to(q.dtype) for x in grads)
    return dq, dk, dv


@Npu.impl(ops.flash_attention, id="npu/fusion_attention_dropout", why_not=_why_not, bwd=_bwd, version=2)
@with_signature_of(ops.flash_attention, without=("bias", "sinks"), spec=attention_spec)
def flash_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, return_lse: bool
) -> tuple[Any, tuple[Any, ...]]:
    assert spec.rng is not None
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    call, atten_mask = dense_call(spec, q, mask)
    if call is None:
        out, lse = without_keys(spec, q)
    else:
        shape = (spec.batch, spec.heads, spec.sq, spec.skv)
        keep = packed_bits(random.keep_mask(shape, spec.dropout_p, spec.rng, q.device))
        out, top, total = call.forward(*flat(spec.layout, q, k, v), atten_mask, keep, 1.0 - spec.dropout_p)
        out, lse = out.view(out_shape(spec, q)), lse_of(top, total)
    return (out, lse) if return_lse else out, (q, k, v, mask, lse, spec)
