"""Functions with torch's signatures on HAL's ops, and the casts that torch's autocast would make for them.

HAL's ops are not in autocast's lists, so these functions follow the lists: products run in autocast's dtype, norms and
losses in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal import ContractError, Rng, ops


def _autocast(device: str) -> bool:
    """Whether autocast is enabled for a type of device; torch has none for some, and raises for these."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def low_precision(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The floating-point tensors in autocast's dtype where autocast is enabled, as it casts operands of products."""
    kind = next(t for t in tensors if t is not None).device.type
    if not _autocast(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


def full_precision(x: Tensor) -> Tensor:
    """x in float32 where autocast is enabled, as it casts operands of norms and losses."""
    return x.float() if _autocast(x.device.type) else x


def fresh_rng() -> Rng:
    """A stream that torch's CPU generator determines.

    So `torch.manual_seed` reproduces it, and activation checkpointing, which restores that generator, recomputes it.
    """
    return Rng(int(torch.randint(1 << 62, ())))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on `ops.flash_attention`.

    query [b, n, sq, d], key [b, g, skv, d], value [b, g, skv, e] -> [b, n, sq, e]; also without the batch dimension.
    attn_mask: bool (True = visible) or added to the scores, broadcastable to [b, n, sq, skv]. is_causal is aligned at
    the first query and key, as in torch. Differs from torch for a query without a visible key: the result is 0, not
    NaN.
    Raises ContractError for shapes other than these, and for a mask together with is_causal, as torch does.
    """
    if query.ndim == 3:
        added = scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        return added[0]
    if query.ndim != 4:
        raise ContractError(
            f"scaled_dot_product_attention: query must be [b, n, s, d] or [n, s, d]; found {tuple(query.shape)}. "
            "Flatten further batch dimensions."
        )
    if attn_mask is not None and is_causal:
        raise ContractError("scaled_dot_product_attention: give attn_mask or is_causal=True, not both")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ContractError(
            f"scaled_dot_product_attention: query has {query.shape[1]} heads and key {key.shape[1]}; grouped-query "
            "attention needs enable_gqa=True"
        )
    q, k, v = low_precision(query, key, value)
    assert q is not None and k is not None and v is not None
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    return ops.flash_attention(  # type: ignore[return-value]  # a pair only with return_lse
        q,
        k,
        v,
        layout="BNSD",
        next_tokens=0 if is_causal else None,
        top_left=is_causal,
        mask=~attn_mask if attn_mask is not None and boolean else None,
        bias=None if attn_mask is None or boolean else attn_mask.to(q.dtype),
        scale=scale,
        dropout_p=dropout_p,
        rng=fresh_rng() if dropout_p else None,
    )
