"""merge_attention by npu_ring_attention_update, which reads both results and writes one in a single pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hal import Call, ops

from ..device import Npu
from ..tensors import reasons

_LANES = 8
"""Copies of each statistic in the operator's last dimension."""
_LEAST = -87.0
"""The smallest exponent of a share, for which exp is a normal float32; such a share is nothing beside the other's 1."""


def _why_not(call: Call) -> Sequence[str]:
    if not call.out.numel():
        return [f"out {tuple(call.out.shape)} without elements (aclnnRingAttentionUpdate takes none)"]
    return reasons(call.out, call.lse, call.part, call.part_lse)


def _lanes(x: Tensor) -> Tensor:
    """x [b, n, s] -> [b, n, s, _LANES]."""
    return x[..., None].expand(*x.shape, _LANES).contiguous()


@Npu.impl(ops.merge_attention, id="npu/ring_attention_update", why_not=_why_not)
def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    # The operator takes a maximum and a sum of each row, of which only sum * exp(maximum) matters, and both must be
    # positive: the shares are the sums here, beside a maximum of 1.
    largest = torch.maximum(lse, part_lse)
    finite = largest.masked_fill(largest == -math.inf, 0.0)  # of rows without visible keys, whose out and part are 0
    old, new = (_lanes((x - finite).clamp(min=_LEAST).exp()) for x in (lse, part_lse))
    ones = torch.ones_like(old)
    merged, _, total = torch.ops.npu.npu_ring_attention_update(
        out.flatten(2), ones, old, part.to(out.dtype).flatten(2), ones, new
    )
    return merged.view(out.shape), largest + total[..., 0].log()
