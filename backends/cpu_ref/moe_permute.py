"""permute and unpermute (kernels/moe_permute.c)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ContractError, address, ops
from hal.backend_tools import permute_backward

from .build import lib
from .device import CpuRef
from .memory import empty
from .tensors import CODE, REAL, addresses, parameter, refuses


def _plan(indices: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor, int]:
    """row_map like indices [t, k], the filled rows of each expert [e], and their sum. capacity: -1 for none."""
    indices = indices.contiguous()
    row_map, sizes = torch.empty_like(indices), torch.empty(num_experts, dtype=torch.int64)
    filled: int = lib("moe").hal_moe_plan(
        *addresses(indices, row_map, sizes),
        indices.numel(),
        num_experts,
        capacity,
    )
    if filled < 0:
        id_range = (int(indices.min()), int(indices.max()))
        raise ContractError(f"permute: expected indices from -1 to {num_experts - 1}; found some from {id_range}")
    return row_map, sizes, filled


def _scatter(x: Tensor, row_map: Tensor, sizes: Tensor, rows: int, capacity: int, filled: int) -> Tensor:
    """Rows [rows, h] of x [t, h], or [rows] of probabilities x [t, k], which are tokens of one channel."""
    tokens, topk = (len(row_map), row_map.shape[1]) if x.ndim == 2 else (row_map.numel(), 1)
    out = empty((rows, *x.shape[1:]), x.dtype)
    if not out.numel():
        return out
    size = out[0].nbytes
    lib("moe").hal_moe_scatter(
        x.data_ptr() or address(x), row_map.data_ptr() or address(row_map), out.data_ptr(), tokens, topk, rows, size
    )
    if filled < rows:
        lib("moe").hal_moe_zero_rest(out.data_ptr(), sizes.data_ptr(), len(sizes), capacity, filled, rows, size)
    return out


def _gather(rows: Tensor, row_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, [t, h], for rows [n, h], row_map [t, k] and probs [t, k] (real), all contiguous."""
    out = empty((len(row_map), rows.shape[1]), rows.dtype)
    if out.numel():
        lib("moe").hal_moe_gather(
            CODE[rows.dtype],
            *addresses(rows, row_map, probs, out),
            *row_map.shape,
            rows.shape[1],
        )
    return out


@CpuRef.impl(ops.permute, id="cpu_ref/c", why_not=refuses(ops.permute), bwd=permute_backward(_gather))
def permute(
    x: Tensor, indices: Tensor, num_experts: int, *, probs: Tensor | None = None, capacity: int | None = None
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    limit = -1 if capacity is None else capacity
    row_map, sizes, filled = _plan(indices, num_experts, limit)
    n = indices.numel() if capacity is None else num_experts * capacity
    rows = _scatter(x.contiguous(), row_map, sizes, n, limit, filled)
    group_sizes = sizes if capacity is None else torch.full_like(sizes, capacity)
    if probs is None:
        return (rows, row_map, group_sizes), (row_map,)
    permuted = _scatter(probs.contiguous().view(-1), row_map, sizes, n, limit, filled)
    return (rows, row_map, group_sizes, permuted), (row_map,)


def _unpermute_bwd(
    residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """drows [n, h] and dprobs [t, k] from dy [t, h], as far as `needs` requires them."""
    rows, count, row_map, probs = residuals
    real, shape = REAL[dy.dtype], (count, dy.shape[1])
    drows, dprobs, weights = None, None, None
    if needs[0]:
        drows = empty(shape, dy.dtype)
        if int((row_map >= 0).sum()) < count:  # rows of no assignment
            drows.zero_()
    if probs is not None:
        weights = parameter(probs, real)
        dprobs = torch.zeros(row_map.shape, dtype=real) if needs[1] else None
    if dy.numel():
        dy = dy.contiguous()
        lib("moe").hal_moe_gather_bwd(
            CODE[dy.dtype],
            *addresses(rows, row_map, weights, dy, drows, dprobs),
            *row_map.shape,
            *shape,
        )
    return drows, None if dprobs is None else dprobs.to(probs.dtype)


@CpuRef.impl(ops.unpermute, id="cpu_ref/c", why_not=refuses(ops.unpermute), bwd=_unpermute_bwd)
def unpermute(
    rows: Tensor, row_map: Tensor, *, probs: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor | None, int, Tensor, Tensor | None]]:
    rows, row_map = rows.contiguous(), row_map.contiguous()
    if not lib("moe").hal_moe_map_fits(row_map.data_ptr() or address(row_map), row_map.numel(), len(rows)):
        raise ContractError(f"unpermute: expected a row_map of {len(rows)} rows; found {int(row_map.max())} in it")
    weights = None if probs is None else parameter(probs, REAL[rows.dtype])
    # Only the gradient of probs reads the rows, so without probs they are not kept for the backward pass.
    return _gather(rows, row_map, weights), (None if probs is None else rows, len(rows), row_map, probs)
