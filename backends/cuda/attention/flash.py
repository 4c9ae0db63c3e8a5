"""cuda/flash: torch's FlashAttention kernels, with windows (defined as HAL's), GQA and packed sequences."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal.backend_tools import AttentionSpec

from .. import launch
from . import stand_ins
from .common import Given, Request, negative_window, ordered_sums, readable, register, sixteen_bit

ID = "cuda/flash"


def _refuse(request: Request) -> list[str]:
    spec = request.spec
    refusals = sixteen_bit(request, "flash") + negative_window(spec, "flash")
    if spec.d % 8 or spec.d > 256:
        refusals.append(f"head size {spec.d} (flash takes multiples of 8 up to 256)")
    if not spec.packed and spec.next is not None and spec.skv <= spec.next < spec.sq - 1:
        refusals.append(
            f"next_tokens={spec.next} of {spec.sq} queries and {spec.skv} keys "
            "(flash reads a side as long as the keys as unbounded)"
        )
    elif not spec.packed and _closes_right(spec):
        refusals.append(
            f"pre_tokens={spec.pre} and next_tokens={spec.next} of {spec.sq} queries and {spec.skv} keys "
            "(with a bounded left side, flash limits an unbounded right side to the number of keys)"
        )
    return refusals


def _closes_right(spec: AttentionSpec) -> bool:
    """Whether the kernel would hide keys of a dense call because the left side is bounded and the right side is not.

    torch's set_params_fprop (flash_api.cpp) then sets the right side to seqlen_k, and the kernel hides columns from
    row + 1 + seqlen_k - seqlen_q + seqlen_k on (Dao-AILab/flash-attention, issue 895).
    """
    right_open = spec.next is None or spec.next >= spec.skv
    return spec.pre is not None and 0 <= spec.pre < spec.skv and right_open and spec.sq > spec.skv + 1


def _longest(cu: Tensor, total: int) -> int:
    """The length of the longest sequence, read from the device once per tensor; during graph capture the token
    count."""
    known = getattr(cu, "_hal_longest", None)
    if known is not None and known[0] == cu._version:
        return int(known[1])
    if cu.is_meta or (cu.is_cuda and torch.cuda.is_current_stream_capturing()):
        return total
    longest = int(cu.diff().max()) if cu.numel() > 1 else 0
    cu._hal_longest = (cu._version, longest)  # type: ignore[attr-defined]
    return longest


def rows(x: Tensor, packed: bool) -> Tensor:
    """x [b, heads, length, d] as the kernel takes it: [b, length, heads, d], or [tokens, heads, d] if packed."""
    x = x.transpose(1, 2)
    return readable(x[0] if packed else x)


def shown_lse(lse: Tensor) -> Tensor:
    """The log-sum-exp as HAL defines it. The kernels return +inf for rows without a visible key, which takes three
    launches to correct, so that it is done where it is seen."""
    return torch.where(lse == math.inf, -math.inf, lse)


def _how(spec: AttentionSpec) -> dict[str, Any]:
    # A side that hides nothing is passed as unbounded. As a number it might not fit into the kernel's 32 bits, and for
    # sq = 1 it would prevent the kernel from using the query heads of a group as rows of one tile (mha_fwd in
    # flash_api.cpp).
    left = -1 if spec.pre is None or spec.pre >= spec.skv else spec.pre
    right = -1 if spec.next is None or spec.next >= spec.sq - 1 else spec.next
    return {"scale": spec.scale, "window_size_left": left, "window_size_right": right}


def lengths(spec: AttentionSpec, cu_q: Tensor, cu_k: Tensor) -> tuple[int, int]:
    """The lengths of the longest sequences to pass to the kernel, which accepts upper bounds."""
    longest_q, longest_k = _longest(cu_q, spec.sq), _longest(cu_k, spec.skv)
    if longest_q == 1 and spec.sq != cu_q.numel() - 1:
        longest_q = 2  # for 1 the kernel moves query heads into the batch, which fails for empty sequences
    if spec.next is not None and longest_k <= spec.next < longest_q - 1:
        longest_k = spec.next + 1  # otherwise the kernel would take the right side for unbounded
    if spec.pre is not None and (spec.next is None or spec.next >= longest_k):
        # With a bounded left side, the kernel limits an unbounded right side to this value (see _closes_right).
        longest_k = max(longest_k, longest_q - 1)
    return longest_q, longest_k


def _forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: Given
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """out [b, n, sq, d], lse [b, n, sq], and what the backward pass needs."""
    kernel = stand_ins.flash_forward if launch.simulated() else torch.ops.aten._flash_attention_forward
    q, k, v = (rows(x, spec.packed) for x in (q, k, v))
    longest, cu_q, cu_k = (spec.sq, spec.skv), given.cu_q, given.cu_k
    if cu_q is not None and cu_k is not None:
        longest = lengths(spec, cu_q, cu_k)
        cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
    out, lse, state, unused, _ = kernel(q, k, v, cu_q, cu_k, *longest, 0.0, spec.causal, False, **_how(spec))
    saved = (q, k, v, out, lse, cu_q, cu_k, *longest, state, unused)
    shown = shown_lse(lse) if given.lse else lse
    out = (out[None] if spec.packed else out).transpose(1, 2)
    return out, shown[None] if spec.packed else shown, saved


def _backward(spec: AttentionSpec, saved: list[Any], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv from dout [b, n, sq, d]."""
    kernel = stand_ins.flash_backward if launch.simulated() else torch.ops.aten._flash_attention_backward
    *inputs, state, unused = saved
    with ordered_sums():
        grads = kernel(rows(dout, spec.packed), *inputs, 0.0, spec.causal, state, unused, **_how(spec))
    dq, dk, dv = ((g[None] if spec.packed else g).transpose(1, 2) for g in grads)
    return dq, dk, dv


register(ID, refuse=_refuse, forward=_forward, backward=_backward)
