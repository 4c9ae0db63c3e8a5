"""permute and unpermute (npu_moe_token_permute, npu_moe_token_unpermute and its gradient).

The vendor's operators do not support dropped assignments. permute gives them the largest index, so that they are sorted
to the end, and zeroes their rows. unpermute gives them the rows that no other assignment has, with probability 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, ops

from .composed import ID
from .constraints import CONSTRAINTS
from .device import Npu
from .tensors import reasons, refuses


def _limits(assignments: Tensor, h: int) -> list[str]:
    refusals = CONSTRAINTS["moe.per_token"].refusal("experts per token", assignments.shape[1])
    refusals += CONSTRAINTS["moe.assignments"].refusal("assignments", assignments.numel())
    if not assignments.numel() or not h:
        refusals.append("an empty call (the operators need an element)")
    return refusals


def _why_not_permute(call: Call) -> Sequence[str]:
    refusals = reasons(call.x, call.probs) + _limits(call.indices, call.x.shape[1])
    if call.capacity is not None:
        refusals.append("a capacity (npu_moe_token_permute does not pad)")
    return refusals


def _sum(rows: Tensor, places: Tensor, probs: Tensor) -> Tensor:
    """The sum of each token's rows [t, h], for rows [t * k, h], places [t * k] int32 and probs [t, k]."""
    total: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows.contiguous(), places, probs)
    return total


def _permute_bwd(residuals: tuple[Any, ...], drows: Tensor, *dpermuted: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx [t, h] from drows [t * k, h], and dprobs [t, k] from those of the rows [t * k]."""
    places, kept = residuals
    # A dropped row may hold any gradient, an infinite one included.
    drows = drows.masked_fill(~_filled(kept)[:, None], 0)
    dx = _sum(drows, places, kept.to(drows.dtype))
    if not dpermuted:
        return dx, None
    return dx, dpermuted[0][places.long()].view(kept.shape) * kept


def _filled(kept: Tensor) -> Tensor:
    """Whether a row holds an assignment, [t * k], if those that are not kept [t, k] are at the end."""
    return torch.arange(kept.numel(), device=kept.device) < kept.sum()


@Npu.impl(ops.permute, id="npu/moe_token_permute", why_not=_why_not_permute, bwd=_permute_bwd)
def permute(
    x: Tensor, indices: Tensor, num_experts: int, *, probs: Tensor | None = None, capacity: int | None = None
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    kept = indices >= 0
    expert = torch.where(kept, indices, num_experts)
    rows, places = torch.ops.npu.npu_moe_token_permute(x.contiguous(), expert)
    rows.masked_fill_(~_filled(kept)[:, None], 0)
    place = places.long().view(indices.shape)
    sizes = torch.zeros(num_experts + 1, dtype=torch.int64, device=x.device)
    sizes = sizes.scatter_add(0, expert.flatten(), torch.ones_like(expert).flatten())[:num_experts].clone()
    result = (rows, torch.where(kept, place, -1), sizes)
    if probs is None:
        return result, (places, kept)
    permuted = torch.zeros_like(probs).flatten().scatter(0, place.flatten(), (probs * kept).flatten())
    return (*result, permuted), (places, kept)


def _why_not_unpermute(call: Call) -> Sequence[str]:
    refusals = reasons(call.rows, call.probs)
    refusals += _limits(call.row_map, call.rows.shape[1])
    if len(call.rows) != call.row_map.numel():
        refusals.append(f"{len(call.rows)} rows for {call.row_map.numel()} assignments (the operator needs as many)")
    return refusals


def _complete(row_map: Tensor) -> tuple[Tensor, Tensor]:
    """Places [t * k] int32 that name every row once, and which assignments are kept, for a row_map [t, k]."""
    flat = row_map.flatten()
    kept, n = flat >= 0, flat.numel()
    used = torch.zeros(n + 1, dtype=torch.int32, device=flat.device)
    used = used.scatter(0, torch.where(kept, flat, n), torch.ones_like(flat, dtype=torch.int32))[:n]
    free = used.sort(stable=True).indices  # unused rows first, in order
    rank = (~kept).to(torch.int64).cumsum(0) - 1
    return torch.where(kept, flat, free[rank.clamp(min=0)]).to(torch.int32), kept.view(row_map.shape)


def _unpermute_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """drows [t * k, h] and dprobs [t, k] (None without probs) from dy [t, h]."""
    rows, places, weights, kept, dtype = residuals
    drows, dprobs = torch.ops.npu.npu_moe_token_unpermute_grad(rows, dy.contiguous(), places, weights)
    return drows, None if dtype is None else (dprobs * kept).to(dtype)


@Npu.impl(ops.unpermute, id="npu/moe_token_unpermute", why_not=_why_not_unpermute, bwd=_unpermute_bwd)
def unpermute(rows: Tensor, row_map: Tensor, *, probs: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    rows = rows.contiguous()
    places, kept = _complete(row_map)
    # Without probs the operator takes one row per token only.
    weights = kept.to(rows.dtype) if probs is None else probs.contiguous() * kept
    return _sum(rows, places, weights), (rows, places, weights, kept, None if probs is None else probs.dtype)


Npu.impl(ops.permute, id=ID, why_not=refuses(ops.permute))(ops.permute.reference)
Npu.impl(ops.unpermute, id=ID, why_not=refuses(ops.unpermute))(ops.unpermute.reference)
