"""permute and unpermute (kernels/moe.cu). torch sorts the assignments, which are k integers per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ops

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


def _shape(x: Tensor, *others: Tensor) -> tuple[int, int]:
    """(threads, whether all rows can be read 16 bytes at a time) for rows like those of x [..., h]."""
    h, lanes = x.shape[-1], LANES[x.dtype]
    vec = h % lanes == 0 and aligned(x, *others)
    return threads_for(-(-h // (lanes if vec else 1))), int(vec)


def _zero_unused(out: Tensor, row_map: Tensor) -> None:
    """Zeroes the rows of out [n, h] that row_map [t, k] does not name."""
    n, flat = len(out), row_map.flatten()
    used = torch.zeros(n + 1, dtype=torch.int64, device=out.device)
    used.scatter_(0, torch.where(flat < 0, n, flat), 1)
    launch.run(f"zero_unused<{TYPE[out.dtype]}>", (launch.blocks(n), 1), 256, used, out, n, out.shape[1])


def _scatter(x: Tensor, row_map: Tensor, n: int) -> Tensor:
    """Rows [n, h] of x [t, h], those of no token zero."""
    x = x.contiguous()
    out = torch.empty(n, x.shape[1], dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if x.numel():
        threads, vec = _shape(x, out)
        launch.run(
            f"moe_scatter<{TYPE[x.dtype]}>",
            (launch.blocks(len(x)), 1),
            threads,
            x,
            row_map,
            out,
            *row_map.shape,
            x.shape[1],
            vec,
        )
    _zero_unused(out, row_map)
    return out


def _gather(rows: Tensor, row_map: Tensor, probs: Tensor | None) -> Tensor:
    """The sum of each token's rows, [t, h], for rows [n, h], row_map [t, k] and probs [t, k] (float32)."""
    rows = rows.contiguous()
    out = torch.empty(len(row_map), rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel():
        threads, vec = _shape(rows, out)
        launch.run(
            f"moe_gather<{TYPE[rows.dtype]}>",
            (launch.blocks(len(out)), 1),
            threads,
            rows,
            row_map,
            probs,
            out,
            *row_map.shape,
            rows.shape[1],
            vec,
        )
    return out


def _permute_bwd(residuals: tuple[Any, ...], drows: Tensor, *dpermuted: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx [t, h] from drows [n, h], and dprobs [t, k] from those of the rows [n]."""
    (row_map,) = residuals
    dx = _gather(drows, row_map, None)
    if not dpermuted:
        return dx, None
    return dx, torch.cat([dpermuted[0], dpermuted[0].new_zeros(1)])[row_map]  # -1 is the zero at the end


@Cuda.impl(ops.permute, id="cuda/kernel", why_not=refuses(ops.permute), bwd=_permute_bwd)
def permute(
    x: Tensor, indices: Tensor, num_experts: int, *, probs: Tensor | None = None, capacity: int | None = None
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    row_map, sizes = _plan(indices, num_experts, capacity)
    n = indices.numel() if capacity is None else num_experts * capacity
    result = (_scatter(x, row_map, n), row_map, sizes)
    if probs is None:
        return result, (row_map,)
    flat = row_map.flatten()
    permuted = torch.zeros(n + 1, dtype=probs.dtype, device=probs.device)
    permuted.scatter_(0, torch.where(flat < 0, n, flat), probs.detach().flatten())
    return (*result, permuted[:n].clone()), (row_map,)


def _unpermute_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """drows [n, h] and dprobs [t, k] (None without probs) from dy [t, h]."""
    rows, row_map, weights, dtype = residuals
    dy, drows = dy.contiguous(), torch.empty_like(rows)
    dprobs = None if weights is None else torch.zeros_like(weights)
    if dy.numel():
        threads, vec = _shape(rows, dy, drows)
        launch.run(
            f"moe_gather_bwd<{TYPE[rows.dtype]}>",
            (launch.blocks(len(dy)), 1),
            threads,
            rows,
            row_map,
            weights,
            dy,
            drows,
            dprobs,
            *row_map.shape,
            rows.shape[1],
            vec,
        )
    if drows.numel():
        _zero_unused(drows, row_map)
    return drows, None if dprobs is None else dprobs.to(dtype)


@Cuda.impl(ops.unpermute, id="cuda/kernel", why_not=refuses(ops.unpermute), bwd=_unpermute_bwd)
def unpermute(rows: Tensor, row_map: Tensor, *, probs: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    rows, row_map = rows.contiguous(), row_map.contiguous()
    weights = None if probs is None else probs.detach().float().contiguous()
    return _gather(rows, row_map, weights), (rows, row_map, weights, None if probs is None else probs.dtype)
