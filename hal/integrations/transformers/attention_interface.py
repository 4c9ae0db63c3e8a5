"""transformers' attention interface on ops.flash_attention, with all arguments that its models pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal import ops
from hal.nn.functional import fresh_rng, low_precision


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | str | None = "not given",
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention interface: query [b,n,sq,d], key and value [b,g,skv,d] -> ([b,sq,n,d], None).

    attention_mask: as `mask` makes it, or a user's own [b,1,sq,skv], bool (True = visible) or added to the scores.
    s_aux: a sink per head. cache: the paged cache of continuous batching. Attention weights are never returned.
    """
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = (t.transpose(1, 2) for t in low_precision(query, key, value) if t is not None)
    batch, length, keys = *q.shape[:2], k.shape[1]
    cu = (kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"))
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        cu = (attention_mask.flatten(),) * 2
    if attention_mask is None or attention_mask.dtype == torch.int32 or attention_mask.shape[2] != length:
        visible = (_pre_tokens(module, keys, sliding_window), 0 if causal else None)
    else:
        visible = (None, None)  # the mask alone defines what is visible
    shared: dict[str, Any] = {
        "pre_tokens": visible[0],
        "next_tokens": visible[1],
        "scale": scaling,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.to(q.dtype),
        "dropout_p": dropout,
        "rng": fresh_rng() if dropout else None,
    }
    if cu[0] is not None and cu[1] is not None:
        fq, fk, fv = (t.flatten(0, 1) for t in (q, k, v))
        lengths = {"cu_seqlens_q": cu[0].int(), "cu_seqlens_k": cu[1].int()}
        out = ops.flash_attention(fq, fk, fv, layout="TND", **lengths, **shared)
        return out.unflatten(0, (batch, length)), None  # type: ignore[union-attr]
    boolean = attention_mask is not None and attention_mask.dtype == torch.bool
    bias = position_bias if attention_mask is None or boolean else attention_mask + (position_bias or 0)
    out = ops.flash_attention(
        q,
        k,
        v,
        layout="BSND",
        mask=~attention_mask if attention_mask is not None and boolean else None,
        bias=None if bias is None else bias.to(q.dtype),
        **shared,
    )
    return out, None  # type: ignore[return-value]


def _pre_tokens(module: torch.nn.Module, keys: int, window: int | str | None) -> int | None:
    """The op's pre_tokens for a sliding window. Raises HalError where a layer may have one but does not pass it."""
    if not isinstance(window, str):
        return None if window is None else window - 1
    configured = getattr(getattr(module, "config", None), "sliding_window", None)
    if configured is not None and keys > configured:
        raise hal.HalError(
            f"{type(module).__name__} does not pass sliding_window to the attention interface, so it is not known "
            f"whether this layer has the window of {configured} that its config names; use attn_implementation='eager'"
        )
    return None
