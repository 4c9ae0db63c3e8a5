"""The row orders of attention's matrices in the formats, and the permutations between them.

All functions take weights [rows, ...] and biases [rows].
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """q [n*d, ...], k and v [g*d, ...] -> Megatron's single matrix: per key/value head [its queries, key, value]."""
    parts = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1).contiguous()


def ungroup_qkv(mixed: Tensor, groups: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of group_qkv, for heads of `head` channels."""
    per_group = mixed.reshape(groups, -1, *mixed.shape[1:])
    parts = torch.split(per_group, [per_group.shape[1] - 2 * head, head, head], dim=1)
    q, k, v = (part.flatten(0, 1).contiguous() for part in parts)
    return q, k, v


def pairs_to_halves(x: Tensor, head: int) -> Tensor:
    """Reorders the rows of each head from rotary pairs (2i, 2i+1) to rotary pairs (i, i + head/2)."""
    return x.reshape(-1, head // 2, 2, *x.shape[1:]).transpose(1, 2).flatten(0, 2).contiguous()


def reorder_legacy_qkv(mixed: Tensor, heads: int, head: int, version: float) -> Tensor:
    """Reorders a QKV matrix of early Megatron-LM versions: rows are [3, n, d] in version 0, [n, d, 3] in version 1."""
    if version >= 2.0:
        return mixed
    rest = mixed.shape[1:]
    if version < 1.0:
        ordered = mixed.reshape(3, heads, head, *rest).transpose(0, 1)
    else:
        ordered = mixed.reshape(heads, head, 3, *rest).transpose(1, 2)
    return ordered.flatten(0, 2).contiguous()
