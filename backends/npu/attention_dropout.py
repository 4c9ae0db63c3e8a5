"""flash_attention with dropout: HAL's mask goes into npu_fusion_attention, and the backward pass is the formula.

The operator's forward pass takes a dropout mask. Its backward pass (npu_fusion_attention_grad, _v2 and _v3 alike) takes
the seed and offset of torch_npu's generator instead and redraws the mask, which can never be HAL's; so gradients are
computed from the statistics on plain operators, which form the matrix of scores for as long as that takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Rng, ops

from . import random
from .attention import beyond_limits, dense_call, flat, nothing
from .attention_call import lse_of, packed_bits
from .device import Npu


def _why_not(
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
    found = beyond_limits(q, k, layout, num_heads)
    if dropout_p == 0.0:
        found.append("no dropout (npu/fusion_attention takes it, backward pass included)")
    if layout == "TND":
        found.append("dropout of packed sequences (HAL draws over all tokens, the library over each sequence)")
    return found


def _bwd(residuals: tuple[Any, ...], dy: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, mask, lse, layout, heads, kv_heads, pre, next, scale, dropout_p, rng = residuals
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group = heads // kv_heads
    q_BNQD, dy_BNQD = (ops.layouts.to_bnsd(x, layout, heads).float() for x in (q, dy))
    k_BNKD, v_BNKD = (ops.layouts.to_bnsd(x, layout, kv_heads).float().repeat_interleave(group, dim=1) for x in (k, v))
    p_BNQK = torch.exp((q_BNQD @ k_BNKD.transpose(-1, -2)) * scale - lse.unsqueeze(-1))
    for hidden in (mask, ops.band_mask(q_BNQD.shape[2], k_BNKD.shape[2], pre, next, q.device)):
        if hidden is not None:
            p_BNQK = p_BNQK.masked_fill(hidden, 0.0)
    keep_BNQK = random.keep_mask(p_BNQK.shape, dropout_p, rng, q.device) * (1.0 / (1.0 - dropout_p))
    dp_BNQK = (dy_BNQD @ v_BNKD.transpose(-1, -2)) * keep_BNQK
    ds_BNQK = p_BNQK * (dp_BNQK - (dp_BNQK * p_BNQK).sum(-1, keepdim=True)) * scale
    dk_BNKD = ds_BNQK.transpose(-1, -2) @ q_BNQD
    dv_BNKD = (p_BNQK * keep_BNQK).transpose(-1, -2) @ dy_BNQD
    grads = ds_BNQK @ k_BNKD, *(x.unflatten(1, (kv_heads, group)).sum(2) for x in (dk_BNKD, dv_BNKD))
    dq, dk, dv = (ops.layouts.from_bnsd(x, layout).to(q.dtype) for x in grads)
    return dq, dk, dv


@Npu.impl(ops.flash_attention, id="npu/fusion_attention_dropout", why_not=_why_not, bwd=_bwd)
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
) -> tuple[Any, tuple[Any, ...]]:
    assert rng is not None
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    batch, heads, sq, head_size = ops.layouts.sizes(q, layout, num_heads)
    kv_heads = num_kv_heads or (heads if "H" in layout else k.shape[layout.index("N")])
    scale = 1.0 / math.sqrt(head_size) if scale is None else scale
    call, atten_mask = dense_call(q, k, layout, heads, scale, pre_tokens, next_tokens, mask)
    if call is None:
        out, lse = nothing(q, layout, heads)
    else:
        keep = random.keep_mask((batch, heads, sq, k.shape[layout.index("S")]), dropout_p, rng, q.device)
        out, top, total = call.forward(*flat(layout, q, k, v), atten_mask, packed_bits(keep), 1.0 - dropout_p)
        out, lse = out.view(q.shape), lse_of(top, total)
    how = layout, heads, kv_heads, pre_tokens, next_tokens, scale, dropout_p, rng
    return (out, lse) if return_lse else out, (q, k, v, mask, lse, *how)
