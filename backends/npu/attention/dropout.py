"""flash_attention with HAL's dropout: unfused, a block of query rows at a time, with dropout by HAL's kernel.

npu_fusion_attention requires dropout masks of the vendor's generator, and its backward pass draws them again. Both
passes here form the probabilities of some rows, drop them (the kernel draws the same elements again), and keep only
out and lse, so that memory is that of one block of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal import Call, Rng, ops
from hal.backend_tools import AttentionSpec, CuSeqlens, attention_spec, packed_starts, with_signature_of

from .. import kernels
from ..device import Npu
from ..random import no_kernel
from ..tensors import reasons
from .fusion_call import aligned

BLOCK_SCORES = 1 << 25
"""Scores of one block of rows, in all heads and batch entries: 128 MiB in float32."""


def _why_not(call: Call) -> Sequence[str]:
    spec = attention_spec(call)
    refusals = [*reasons(call.q), *spec.refusals("npu/unfused_dropout", ("dv", "top_left")), *no_kernel()]
    if spec.dropout_p == 0.0:
        refusals.append("no dropout (npu/fusion_attention takes it)")
    return refusals


def _to_bnsd(x: Tensor, layout: str, heads: int) -> Tensor:
    """x in float32 as [b, n, s, d]; packed sequences as one batch entry."""
    return (x.transpose(0, 1)[None] if layout == "TND" else ops.layouts.to_bnsd(x, layout, heads)).float()


def _from_bnsd(x: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    return (x[0].transpose(0, 1) if layout == "TND" else ops.layouts.from_bnsd(x, layout)).to(dtype)


class _Block(NamedTuple):
    """Rows of queries and the keys of their sequence, in [b, n, s, d]; all sequences that are packed are one such s.

    first: the number of the first row in its sequence, which has sq rows and sk keys. rng: of the probabilities
    [b, n, rows, sk], without b if packed.
    """

    rows: slice
    keys: slice
    first: int
    sq: int
    sk: int
    rng: Rng


def _blocks(spec: AttentionSpec, cu_seqlens: CuSeqlens) -> Iterator[_Block]:
    assert spec.rng is not None
    starts = ([0, spec.sq], [0, spec.skv]) if cu_seqlens is None else cu_seqlens
    own = (spec.heads, spec.sq, spec.skv) if spec.packed else (spec.batch, spec.heads, spec.sq, spec.skv)
    full = own if spec.rng.full_shape is None else spec.rng.full_shape
    start = (0,) * len(full) if spec.rng.start is None else spec.rng.start
    for q0, q1, k0, k1 in zip(starts[0], starts[0][1:], starts[1], starts[1][1:]):
        rows = max(1, BLOCK_SCORES // max(1, spec.batch * spec.heads * (k1 - k0)))
        for i0 in range(q0, q1 if k1 > k0 else q0, rows):
            i1 = min(i0 + rows, q1)
            rng = spec.rng.block(full, (*start[:-2], start[-2] + i0, start[-1] + k0))
            yield _Block(slice(i0, i1), slice(k0, k1), i0 - q0, q1 - q0, k1 - k0, rng)


def _hidden(spec: AttentionSpec, block: _Block, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """True where a key is hidden from a row of the block, broadcastable to [b, n, rows, sk]; None if nowhere."""
    pre, next = spec.pre, spec.next
    if spec.top_left:
        pre, next = aligned(pre, next, block.sq, block.sk)
    rows = block.rows.stop - block.rows.start
    # band_mask aligns the last row with the last key; row r is row first + r of the sequence.
    shift = block.first + rows - block.sq
    pre, next = None if pre is None else pre - shift, None if next is None else next + shift
    band = ops.band_mask(rows, block.sk, pre, next, device)
    if mask is None:
        return band
    part = mask[..., block.rows, :] if mask.ndim > 1 and mask.shape[-2] > 1 else mask
    return part if band is None else part | band


def _drop(x: Tensor, block: _Block, spec: AttentionSpec) -> Tensor:
    """dropout(x [b, n, rows, sk]) of the block's probabilities or of their gradient."""
    shaped = x[0] if spec.packed else x
    return kernels.dropped(shaped, spec.dropout_p, block.rng).view(x.shape)


def _bwd(residuals: tuple[Any, ...], dy: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the layout of q, k and v: the softmax's gradient, with probabilities recomputed from lse."""
    q, k, v, mask, lse, spec, cu_seqlens = residuals
    layout, heads, kv_heads, group = spec.layout, spec.heads, spec.kv_heads, spec.group
    q_BNQD, dy_BNQE = (_to_bnsd(x, layout, heads) for x in (q, dy))
    k_BNKD, v_BNKE = (_to_bnsd(x, layout, kv_heads).repeat_interleave(group, dim=1) for x in (k, v))
    dq, dk, dv = torch.zeros_like(q_BNQD), torch.zeros_like(k_BNKD), torch.zeros_like(v_BNKE)
    for block in _blocks(spec, cu_seqlens):
        i, j = block.rows, block.keys
        q_i, k_j, dy_i = q_BNQD[:, :, i], k_BNKD[:, :, j], dy_BNQE[:, :, i]
        p = torch.exp((q_i @ k_j.transpose(-1, -2)) * spec.scale - lse[:, :, i, None])
        hidden = _hidden(spec, block, mask, q.device)
        if hidden is not None:
            p = p.masked_fill(hidden, 0.0)
        # With delta = rowsum(dP P), dS = P (dP - delta) scale; dropout applies to P in out = P V, and so to dP.
        dp = _drop(dy_i @ v_BNKE[:, :, j].transpose(-1, -2), block, spec)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * spec.scale
        dq[:, :, i] = ds @ k_j
        dk[:, :, j] += ds.transpose(-1, -2) @ q_i
        dv[:, :, j] += _drop(p, block, spec).transpose(-1, -2) @ dy_i
    shared = (x.unflatten(1, (kv_heads, group)).sum(2) for x in (dk, dv))
    dq, dk, dv = (_from_bnsd(x, layout, q.dtype) for x in (dq, *shared))
    return dq, dk, dv


@Npu.impl(ops.flash_attention, id="npu/unfused_dropout", why_not=_why_not, bwd=_bwd, version=2)
@with_signature_of(ops.flash_attention, without=("bias", "sinks"), spec=attention_spec, cu_seqlens=packed_starts)
def flash_attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: CuSeqlens,
    return_lse: bool,
) -> tuple[Any, tuple[Any, ...]]:
    layout, kv_heads, group = spec.layout, spec.kv_heads, spec.group
    q_BNQD = _to_bnsd(q, layout, spec.heads)
    k_BNKD, v_BNKE = (_to_bnsd(x, layout, kv_heads).repeat_interleave(group, dim=1) for x in (k, v))
    out = q_BNQD.new_zeros(*q_BNQD.shape[:3], spec.dv)
    lse = q_BNQD.new_full(q_BNQD.shape[:3], -math.inf)
    for block in _blocks(spec, cu_seqlens):
        scores = (q_BNQD[:, :, block.rows] @ k_BNKD[:, :, block.keys].transpose(-1, -2)) * spec.scale
        hidden = _hidden(spec, block, mask, q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        top = torch.logsumexp(scores, -1, keepdim=True)
        lse[:, :, block.rows] = top[..., 0]
        # Rows without a visible key have probabilities of exp(-inf) = 0.
        p = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))
        out[:, :, block.rows] = _drop(p, block, spec) @ v_BNKE[:, :, block.keys]
    result = _from_bnsd(out, layout, q.dtype)
    shown = lse[0] if spec.packed else lse
    return (result, shown) if return_lse else result, (q, k, v, mask, lse, spec, cu_seqlens)
