"""flash_attention on npu_fusion_attention (see attention_call.py), dense and packed, without dropout.

Packed sequences (TND) go to the library in one call where it accepts every one of them, otherwise one at a time.
Dropout is in attention_dropout.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Rng, ops

from .attention_call import Call, Plan, full_mask, lse_of, plan, plan_packed, triangle
from .device import Npu
from .tensors import reasons

HEADS, HEAD_SIZE, TOKENS, BATCH, PACKED = 256, 768, 1 << 20, 1 << 21, 2048
"""Documented limits of aclnnFlashAttentionScore on Atlas A2; PACKED sequences of aclnnFlashAttentionVarLenScore."""


def beyond_limits(q: Tensor, k: Tensor, layout: str, num_heads: int | None) -> list[str]:
    """Why npu_fusion_attention refuses tensors of these dtypes and sizes; empty = it takes them."""
    found = reasons(q)
    batch, heads, length, head_size = ops.layouts.sizes(q, layout, num_heads)
    keys = k.shape[layout.index("T" if layout == "TND" else "S")]
    limits = {"heads": (heads, HEADS), "channels per head": (head_size, HEAD_SIZE), "batch entries": (batch, BATCH)}
    limits["tokens"] = (max(length, keys), TOKENS)
    return found + [
        f"{n} {what} (npu_fusion_attention takes up to {most})" for what, (n, most) in limits.items() if n > most
    ]


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
    if cu_seqlens_q is not None and len(cu_seqlens_q) - 1 > PACKED:
        found.append(f"{len(cu_seqlens_q) - 1} packed sequences (npu_fusion_attention takes up to {PACKED})")
    if dropout_p > 0.0:
        found.append("dropout (npu_fusion_attention_grad takes no mask and redraws one from torch_npu's generator)")
    return found


def backward(residuals: tuple[Any, ...], dy: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, mask, out, top, total, how = residuals
    if how is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if isinstance(how, Call):
        shapes = q.shape, k.shape, v.shape
        if how.layout == "SBH":
            q, k, v, out, dy = (x.reshape(*x.shape[:2], -1) for x in (q, k, v, out, dy))
        dq, dk, dv = how.backward(q, k, v, mask, out, top, total, dy)
        return dq.view(shapes[0]), dk.view(shapes[1]), dv.view(shapes[2])
    return _one_by_one_bwd(q, k, v, out, top, total, how, dy)


_ROUNDED_OUTPUT = "npu_fusion_attention_grad forms its row sums from the 16-bit output, not from what was rounded"
WAIVERS = {torch.float16: (2.0, _ROUNDED_OUTPUT), torch.bfloat16: (2.0, _ROUNDED_OUTPUT)}


@Npu.impl(
    ops.flash_attention,
    id="npu/fusion_attention",
    why_not=_why_not,
    bwd=backward,
    waivers=WAIVERS,
)
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
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    _, heads, _, head_size = ops.layouts.sizes(q, layout, num_heads)
    scale = 1.0 / math.sqrt(head_size) if scale is None else scale
    if layout == "TND":
        assert cu_seqlens_q is not None and cu_seqlens_k is not None
        ends = packed_ends(cu_seqlens_q, q.shape[0], "q"), packed_ends(cu_seqlens_k, k.shape[0], "k")
        return _packed(q, k, v, *ends, heads, scale, pre_tokens, next_tokens, return_lse)
    call, atten_mask = dense_call(q, k, layout, heads, scale, pre_tokens, next_tokens, mask)
    return run_dense(q, k, v, layout, heads, call, atten_mask, return_lse)


def run_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    heads: int,
    call: Call | None,
    atten_mask: Tensor | None,
    return_lse: bool,
) -> tuple[Any, tuple[Any, ...]]:
    """The result of a dense call, and what `backward` needs of it."""
    if call is None:
        out, lse = nothing(q, layout, heads)
        return (out, lse) if return_lse else out, (q, k, v, None, out, out, out, None)
    out, top, total = call.forward(*flat(layout, q, k, v), atten_mask)
    out = out.view(q.shape)
    return (out, lse_of(top, total)) if return_lse else out, (q, k, v, atten_mask, out, top, total, call)


def dense_call(
    q: Tensor,
    k: Tensor,
    layout: str,
    heads: int,
    scale: float,
    pre: int | None,
    next: int | None,
    mask: Tensor | None,
) -> tuple[Call | None, Tensor | None]:
    """The call of a dense layout and its atten_mask; no call where there is no query or no key."""
    batch, _, sq, _ = ops.layouts.sizes(q, layout, heads)
    sk = k.shape[layout.index("S")]
    if not q.numel() or not sk:
        return None, None
    chosen = plan(sq, sk, pre, next, mask is not None)
    atten_mask = None
    if chosen.mask == "triangle":
        atten_mask = triangle(q.device)
    elif chosen.mask == "full":
        atten_mask = full_mask(mask, ops.band_mask(sq, sk, pre, next, q.device), batch, heads, sq, sk)
    return Call("SBH" if layout == "SBND" else layout, heads, scale, chosen), atten_mask


def flat(layout: str, *tensors: Tensor) -> Sequence[Tensor]:
    """The tensors in a layout that the library has: SBND as SBH."""
    return [x.reshape(*x.shape[:2], -1) for x in tensors] if layout == "SBND" else tensors


def nothing(q: Tensor, layout: str, heads: int) -> tuple[Tensor, Tensor]:
    """out and lse where no query sees a key."""
    batch, _, sq, _ = ops.layouts.sizes(q, layout, heads)
    return torch.zeros_like(q), q.new_full((batch, heads, sq), -math.inf, dtype=torch.float32)


def packed_ends(cu_seqlens: Tensor, tokens: int, name: str) -> list[int]:
    """Where each sequence ends: Ascend's form has no leading 0. Raises ContractError for what is not cumulative."""
    starts = cu_seqlens.tolist()
    rising = starts[0] == 0 and all(a <= b for a, b in pairwise(starts)) and starts[-1] == tokens
    hal.require(rising, "flash_attention", f"cu_seqlens_{name} rising from 0 to {tokens}", starts)
    return starts[1:]


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: list[int],
    k_ends: list[int],
    heads: int,
    scale: float,
    pre: int | None,
    next: int | None,
    return_lse: bool,
) -> tuple[Any, tuple[Any, ...]]:
    """All sequences in one call where the library accepts them, otherwise one call per sequence."""
    lengths = [[b - a for a, b in zip([0, *ends], ends)] for ends in (q_ends, k_ends)]
    together = plan_packed(*lengths, pre, next) if q.numel() else Plan()
    how: Any = None
    atten_mask = None
    out, top = torch.zeros_like(q), q.new_zeros((*q.shape[:2], 8), dtype=torch.float32)
    total = top
    if together is not None and q.numel():
        how = Call("TND", heads, scale, together, tuple(q_ends), tuple(k_ends))
        atten_mask = None if together.mask == "none" else triangle(q.device)
        out, top, total = how.forward(q, k, v, atten_mask)
    elif q.numel():
        how = _Sequences(tuple(q_ends), tuple(k_ends), heads, scale, pre, next)
        top, total = torch.full_like(top, -torch.finfo(torch.float32).max), torch.ones_like(top)
        for rows, columns, call, mask in how.calls(q.device):
            one = call.forward(q[None, rows], k[None, columns], v[None, columns], mask)
            out[rows] = one[0][0]
            top[rows], total[rows] = (x[0].transpose(0, 1) for x in one[1:])
    result = (out, lse_of(top, total).T) if return_lse else out
    return result, (q, k, v, atten_mask, out, top, total, how)


@dataclass(frozen=True)
class _Sequences:
    """Packed sequences that are computed one by one, each as a batch of one."""

    q_ends: tuple[int, ...]
    k_ends: tuple[int, ...]
    heads: int
    scale: float
    pre: int | None
    next: int | None

    def calls(self, device: torch.device) -> Iterator[tuple[slice, slice, Call, Tensor | None]]:
        """(query tokens, key tokens, call, atten_mask) of each sequence that has both."""
        for q0, q1, k0, k1 in zip((0, *self.q_ends), self.q_ends, (0, *self.k_ends), self.k_ends):
            sq, sk = q1 - q0, k1 - k0
            if not sq or not sk:
                continue
            chosen = plan(sq, sk, self.pre, self.next, False)
            mask = triangle(device) if chosen.mask == "triangle" else None
            if chosen.mask == "full":
                mask = full_mask(None, ops.band_mask(sq, sk, self.pre, self.next, device), 1, self.heads, sq, sk)
            yield slice(q0, q1), slice(k0, k1), Call("BSND", self.heads, self.scale, chosen), mask


def _one_by_one_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, top: Tensor, total: Tensor, how: _Sequences, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns, call, mask in how.calls(q.device):
        stats = [x[rows].transpose(0, 1)[None].contiguous() for x in (top, total)]
        parts = q[None, rows], k[None, columns], v[None, columns], mask, out[None, rows], *stats, dy[None, rows]
        grads = call.backward(*parts)
        dq[rows], dk[columns], dv[columns] = (g[0] for g in grads)
    return dq, dk, dv
