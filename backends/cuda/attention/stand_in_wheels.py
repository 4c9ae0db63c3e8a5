"""Stand-ins of the wheels of FlashAttention-3 and -4 on the simulator, which torch's own functions import and call.

FlashAttention-3 is the ops `flash_attn_3::fwd` and `bwd`, FlashAttention-4 the functions `_flash_attn_fwd` and
`_flash_attn_bwd` of its module. Only what torch passes is implemented. Windows are those of hopper/flash_api.cpp and
flash_attn/cute/interface.py (Dao-AILab/flash-attention): a side that is not given hides nothing, also where there are
more queries than keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .stand_ins import Window, attend, differentiate

_FWD = """fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None,
Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,
Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None,
Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None,
Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None,
float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1,
int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None,
int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"""
"""The schema of hopper/flash_api.cpp."""

_BWD = """bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk,
Tensor(c!)? dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q,
int? max_seqlen_k, float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
bool deterministic, int sm_margin) -> ()"""
"""Likewise, without the results, which torch does not read."""


def _window(q: Tensor, k: Tensor, causal: bool, left: int | None, right: int | None) -> Window:
    """The window of a call, in which a side of None or less than 0 hides nothing."""
    left, right = (-1 if n is None or n < 0 else n for n in (left, right))
    return Window(left, 0 if causal else right, q.shape[-3] + k.shape[-3])


def _require(q: Tensor, k: Tensor, v: Tensor, widest: int) -> None:
    """Raises RuntimeError for what the wheels refuse."""
    if q.dtype not in (torch.float16, torch.bfloat16) or {k.dtype, v.dtype} != {q.dtype}:
        raise RuntimeError(f"q, k and v must be float16 or bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > widest or k.shape[-1] != q.shape[-1]:
        raise RuntimeError(f"head sizes must be multiples of 8 up to {widest}, got {q.shape[-1]} and {k.shape[-1]}")
    if q.shape[-2] % k.shape[-2] or any(x.stride(-1) != 1 for x in (q, k, v)):
        raise RuntimeError("the heads of k must divide those of q, and the last dimension must be contiguous")


def _fwd(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = dict(zip((a.name for a in torch.ops.flash_attn_3.fwd.default._schema.arguments[3:]), more))
    _require(q, k, v, 256)
    window = _window(q, k, given["is_causal"], given["window_size_left"], given["window_size_right"])
    out, lse = attend(q, k, v, given["cu_seqlens_q"], given["cu_seqlens_k"], given["softmax_scale"], window)
    return out, lse, q.new_empty(0), q.new_empty(0)


def _bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    used_q: None,
    used_k: None,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    *_: Any,
) -> None:
    window = _window(q, k, causal, left, right)
    for target, value in zip((dq, dk, dv), differentiate(dout, q, k, v, cu_q, cu_k, scale, window)):
        target.copy_(value)


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-4's; max_seqlen_q, max_seqlen_k, return_lse and the options of paged caches follow."""
    _require(q, k, v, 128)
    window = _window(q, k, causal, window_size_left, window_size_right)
    return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window)


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-4's backward pass: dq, dk, dv."""
    window = _window(q, k, causal, window_size_left, window_size_right)
    return differentiate(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window)


if not hasattr(torch.ops.flash_attn_3, "fwd"):
    _definitions = torch.library.Library("flash_attn_3", "FRAGMENT")
    _definitions.define(_FWD)
    _definitions.define(_BWD)
_implementations = torch.library.Library("flash_attn_3", "IMPL")
_implementations.impl("fwd", _fwd, "CPU")
_implementations.impl("bwd", _bwd, "CPU")
