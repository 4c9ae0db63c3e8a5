"""Windows, masks and packed sequences as one boolean tensor, True = masked out, without synchronising with the host."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backend_tools import AttentionSpec


def outside_window(i: Tensor, j: Tensor, pre: int | None, next: int | None) -> Tensor | None:
    """True where key j is outside the window of query i (already shifted by skv - sq); None if all keys are inside."""
    outside = None
    if pre is not None:
        outside = j < i - pre
    if next is not None:
        late = j > i + next
        outside = late if outside is None else outside | late
    return outside


def dense_mask(spec: AttentionSpec, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Window and mask of a dense call, broadcastable to [b, n, sq, skv]; None if everything is visible."""
    i = torch.arange(spec.sq, device=device)[:, None] + (spec.skv - spec.sq)
    j = torch.arange(spec.skv, device=device)[None]
    outside = outside_window(i, j, spec.pre, spec.next)
    if outside is None or mask is None:
        return mask if outside is None else outside
    return mask | outside


def packed_mask(spec: AttentionSpec, cu_q: Tensor, cu_k: Tensor) -> Tensor:
    """[tq, tk]: a query sees the keys of its own sequence that are inside the window."""
    owner_q, i, owner_k, j = packed_positions(spec, cu_q, cu_k)
    other = owner_q[:, None] != owner_k[None]
    outside = outside_window(i[:, None], j[None], spec.pre, spec.next)
    return other if outside is None else other | outside


def packed_positions(spec: AttentionSpec, cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence and position of each query [tq] and key [tk].

    Queries are aligned with their sequence's last key, or with its first if the call has top_left.
    """
    owner_q, i = _positions(cu_q, spec.sq)
    owner_k, j = _positions(cu_k, spec.skv)
    if not spec.top_left:
        i = i + (cu_k.diff() - cu_q.diff())[owner_q]
    return owner_q, i, owner_k, j


def _positions(cu: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For every packed token [total]: the index of its sequence, and its position in it."""
    token = torch.arange(total, device=cu.device, dtype=torch.int32)
    owner = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    return owner, token - cu[owner]
