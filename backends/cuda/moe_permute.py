"""permute and unpermute (kernels/moe.cu). torch sorts the assignments, which are k integers per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.backend_tools import permute_backward, permuted_probs, unpermute_from

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, refuses, threads_for


def _plan(indices: Tensor, num_experts: int, capacity: int | None) -> tuple[Tensor, Tensor]:
    """row_map like indices [t, k], and the sizes of the groups [e]."""
    expert = torch.where(indices < 0, num_experts, indices).flatten()
    order = expert.sort(stable=True).indices
    position = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    ends = torch.searchsorted(expert[order], torch.arange(num_experts, device=order.device), right=True)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    kept, row = expert < num_experts, position
    if capacity is not None:
        starts = torch.cat([ends.new_zeros(1), ends])
        rank = position - starts[expert]
        kept, row, sizes = kept & (rank < capacity), expert * capacity + rank, torch.full_like(sizes, capacity)
    return torch.where(kept, row, -1).view(indices.shape), sizes


def _run(kernel: str, row_map: Tensor, vectors: tuple[Tensor, ...], *tensors: Tensor | None) -> None:
    """Launches a kernel with one block per token of row_map [t, k]; vectors [..., h]: those of `tensors` that it reads
    or writes 16 bytes at a time if all of them allow it."""
    h, lanes = vectors[0].shape[-1], LANES[vectors[0].dtype]
    vec = h % lanes == 0 and aligned(*vectors)
    launch.run(
        f"{kernel}<{TYPE[vectors[0].dtype]}>",
        (launch.blocks(len(row_map)), 1),
        threads_for(-(-h // (lanes if vec else 1))),
        *tensors,
        *row_map.shape,
        h,
        int(vec),
    )


def _zero_unused(out: Tensor, row_map: Tensor) -> None:
    """Zeroes the rows of out [n, h] that row_map [t, k] does not name."""
    n, flat = len(out), row_map.flatten()
    used = torch.zeros(n + 1, dtype=torch.int64, device=out.device)
    used.scatter_(0, torch.where(flat < 0, n, flat), 1)
    launch.run(f"zero_unused<{TYPE[out.dtype]}>", (launch.blocks(n), 1), 256, used, out, n, out.shape[1])


def _scatter(x: Tensor, row_map: Tensor, n: int) -> Tensor:
    """Rows [n, h] of x [t, h]; rows that belong to no token are zero."""
    x = x.contiguous()
    out = torch.empty(n, x.shape[1], dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if x.numel():
        _run("moe_scatter", row_map, (x, out), x, row_map, out)
    _zero_unused(out, row_map)
    return out


def _gather(rows: Tensor, row_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, [t, h], for rows [n, h], row_map [t, k] and probs [t, k] (float32)."""
    out = torch.empty(len(row_map), rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel():
        _run("moe_gather", row_map, (rows, out), rows, row_map, probs, out)
    return out


@Cuda.impl(ops.permute, id="cuda/kernel", why_not=refuses(ops.permute), bwd=permute_backward(_gather))
def permute(
    x: Tensor, indices: Tensor, num_experts: int, *, probs: Tensor | None = None, capacity: int | None = None
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    row_map, sizes = _plan(indices, num_experts, capacity)
    n = indices.numel() if capacity is None else num_experts * capacity
    result = (_scatter(x, row_map, n), row_map, sizes)
    if probs is None:
        return result, (row_map,)
    return (*result, permuted_probs(probs, row_map, n)), (row_map,)


def _gather_bwd(rows: Tensor, row_map: Tensor, probs: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """drows [n, h] and dprobs [t, k] (None without probs) from dy [t, h]."""
    drows, dprobs = torch.empty_like(rows), None if probs is None else torch.zeros_like(probs)
    if dy.numel():
        _run("moe_gather_bwd", row_map, (rows, dy, drows), rows, row_map, probs, dy, drows, dprobs)
    if drows.numel():
        _zero_unused(drows, row_map)
    return drows, dprobs


unpermute, _unpermute_bwd = unpermute_from(_gather, _gather_bwd)
Cuda.impl(ops.unpermute, id="cuda/kernel", why_not=refuses(ops.unpermute), bwd=_unpermute_bwd)(unpermute)
