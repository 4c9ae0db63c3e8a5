"""flash_attention as megatron_npu runs it by default (`high_precision` not set): for whoever pins it, never chosen.

`--pin flash_attention=npu/fusion_attention_low_precision` asks for inner_precise=1, the library's default in CANN 7.0,
which documents 0 as high precision; later releases document no difference. Every other call asks for 0, or for 2 where
rows may see nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hal import Rng, ops

from .attention import WAIVERS, backward, beyond_limits, dense_call, run_dense
from .attention_call import plan
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
    if dropout_p > 0.0:
        found.append("dropout (npu/fusion_attention_dropout takes it)")
    if layout == "TND":
        return [*found, "packed sequences (npu/fusion_attention takes them)"]
    sq, sk = q.shape[layout.index("S")], k.shape[layout.index("S")]
    if plan(sq, sk, pre_tokens, next_tokens, mask is not None).dead_rows:
        found.append("rows that may see nothing (only inner_precise=2 makes them 0)")
    return found


@Npu.impl(
    ops.flash_attention,
    id="npu/fusion_attention_low_precision",
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
    call, atten_mask = dense_call(q, k, layout, heads, scale, pre_tokens, next_tokens, mask)
    if call is not None:
        call = dataclasses.replace(call, low_precision=True)
    return run_dense(q, k, v, layout, heads, call, atten_mask, return_lse)
