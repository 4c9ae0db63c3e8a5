"""permute: tokens to rows grouped by expert; unpermute: the weighted sum of each token's rows.

The semantics are those of megatron-core 0.16.1's permute and unpermute (megatron/core/transformer/moe/moe_utils.py),
with the rows of every token as a map [t, k], so that unpermute and the gradient of permute gather.
Shapes: t tokens, k experts per token, n rows, h channels, e experts.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hal
from hal import Call, Sample, TensorSpec, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

WEIGHTED_TOL = {
    torch.float32: Tol(2e-6, 1e-5),  # sums of k products; the gradient of probs sums h products
    torch.bfloat16: Tol(2e-2, 1.6e-2),
    torch.float16: Tol(2.5e-3, 2e-3),
}
"""Tolerances of rows times probabilities."""


def _check_permute(call: Call) -> None:
    op, x, indices, probs = "permute", call.x, call.indices, call.probs
    require(x.ndim == 2, op, "x of shape [tokens, h]", tuple(x.shape))
    require(indices.ndim == 2 and len(indices) == len(x), op, f"indices of shape [{len(x)}, k]", tuple(indices.shape))
    require(indices.dtype == torch.int64, op, "int64 indices", indices.dtype)
    require(call.num_experts >= 1, op, "num_experts >= 1", call.num_experts)
    require(call.capacity is None or call.capacity >= 0, op, "capacity >= 0", call.capacity)
    if probs is not None:
        require(probs.shape == indices.shape, op, f"probs of shape {tuple(indices.shape)}", tuple(probs.shape))
        require(probs.dtype in (x.dtype, torch.float32), op, "probs in x's dtype or float32", probs.dtype)


def _permute_sample(
    tokens: int, h: int, topk: int, experts: int, probs: bool = True, low: int = 0, strided: str = "", **kw: Any
) -> Sample:
    """low: -1 for dropped assignments."""
    indices = TensorSpec((tokens, topk), "int", low=low, high=experts, dtype=torch.int64)
    dtype = kw.pop("dtype", None)
    weights = TensorSpec((tokens, topk), dtype=dtype) if probs else None
    return Sample((TensorSpec((tokens, h), strided=strided), indices, experts), {"probs": weights, **kw})


def _edge_cases_permute() -> list[Sample]:
    none = TensorSpec((3, 2), "values", values=(-1.0,) * 6, dtype=torch.int64)
    unused = TensorSpec((5, 2), "values", values=(3, 1, 1, 3, 3, 1, 1, 3, 1, 3), dtype=torch.int64)
    return [
        _permute_sample(5, 6, 2, 4),
        _permute_sample(5, 6, 2, 4, probs=False),
        _permute_sample(7, 3, 1, 3),
        _permute_sample(6, 8, 3, 5, low=-1),
        _permute_sample(6, 8, 3, 5, low=-1, capacity=3),
        _permute_sample(6, 8, 2, 3, capacity=4, dtype=torch.float32),
        _permute_sample(6, 8, 2, 3, capacity=20, probs=False),
        _permute_sample(6, 8, 2, 3, dtype=torch.float32),
        Sample((TensorSpec((5, 4)), unused, 5), {"probs": TensorSpec((5, 2))}),  # experts without tokens
        Sample((TensorSpec((3, 4)), none, 2), {"probs": TensorSpec((3, 2))}),
        _permute_sample(0, 4, 2, 3),
        _permute_sample(4, 0, 2, 3),
        _permute_sample(9, 10, 2, 4, strided="last"),
        _permute_sample(9, 10, 2, 4, strided="rows"),
        _permute_sample(1, 1, 1, 1),
        _permute_sample(257, 33, 4, 12),
    ]


def _samples_permute() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        kw: dict[str, Any] = {"capacity": draw(st.sampled_from([None, None, 0, 3, 9]))}
        kw |= {"low": draw(st.sampled_from([0, -1])), "strided": draw(st.sampled_from(["", "rows", "last"]))}
        kw |= {"probs": draw(st.booleans()), "dtype": draw(st.sampled_from([None, torch.float32]))}
        sizes = (draw(st.integers(0, 20)), draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 9)))
        return _permute_sample(*sizes, **kw)

    return call()


@hal.op(
    check=_check_permute,
    tol={  # the forward copies; the gradient is a sum of k rows
        torch.float32: Tol(1e-6, 1e-6),
        torch.bfloat16: Tol(8e-3, 8e-3),
        torch.float16: Tol(1e-3, 1e-3),
    },
    samples=_samples_permute,
    edge_cases=_edge_cases_permute,
    grads=("x", "probs"),
    nondiff_outputs=(1, 2),
)
def permute(
    x: Tensor, indices: Tensor, num_experts: int, *, probs: Tensor | None = None, capacity: int | None = None
) -> tuple[Tensor, ...]:
    """(rows [n, h], row_map [t, k] int64, group_sizes [e] int64), and the rows' probabilities [n] if there are probs.

    x [t, h]; indices [t, k] int64: the expert of each assignment, -1 for a dropped one; probs [t, k]. rows holds the
    token of every assignment, ordered by expert, then by token, then by position in indices. row_map holds the row of
    each assignment, -1 for a dropped one; group_sizes the number of rows of each expert.

    n = t * k, so that no size depends on values: rows that no assignment fills, at the end, are zero. With capacity,
    each expert has that number of rows (n = e * capacity, all group_sizes = capacity): the rest of them are zero, and
    assignments beyond them are dropped.
    """
    topk, h = indices.shape[1], x.shape[1]
    expert = torch.where(indices < 0, num_experts, indices).flatten()
    order = expert.sort(stable=True).indices
    position = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
    sizes = torch.zeros(num_experts + 1, dtype=torch.int64, device=x.device)
    sizes = sizes.scatter_add(0, expert, torch.ones_like(expert))
    dropped, row, n = expert == num_experts, position, expert.numel()
    if capacity is not None:
        rank = position - (sizes.cumsum(0) - sizes).gather(0, expert)
        dropped, row, n = dropped | (rank >= capacity), expert * capacity + rank, num_experts * capacity
        sizes = torch.full_like(sizes, capacity)
    copies = x[:, None].expand(-1, topk, -1).reshape(expert.numel(), h)
    row = torch.where(dropped, n, row)  # row n is cut off at the end
    rows = x.new_zeros(n + 1, h).index_add(0, row, copies)[:n].clone()
    result = (rows, torch.where(dropped, -1, row).view(indices.shape), sizes[:num_experts].clone())
    if probs is None:
        return result
    return (*result, probs.new_zeros(n + 1).index_add(0, row, probs.flatten())[:n].clone())


def _check_unpermute(call: Call) -> None:
    op, rows, row_map, probs = "unpermute", call.rows, call.row_map, call.probs
    require(rows.ndim == 2, op, "rows of shape [n, h]", tuple(rows.shape))
    require(
        row_map.ndim == 2 and row_map.dtype == torch.int64, op, "an int64 row_map [tokens, k]", tuple(row_map.shape)
    )
    if probs is not None:
        require(probs.shape == row_map.shape, op, f"probs of shape {tuple(row_map.shape)}", tuple(probs.shape))
        require(probs.dtype in (rows.dtype, torch.float32), op, "probs in the rows' dtype or float32", probs.dtype)


def _unpermute_sample(
    tokens: int, h: int, topk: int, unused: int = 0, dropped: int = 0, probs: bool = True, **how: Any
) -> Sample:
    """unused: rows that belong to no assignment; dropped: assignments without a row."""
    dtype = how.pop("dtype", None)
    count = tokens * topk
    values = [*range(count - dropped + unused)]
    random.Random(count).shuffle(values)
    values = values[: count - dropped] + [-1] * dropped
    random.Random(count + 1).shuffle(values)
    row_map = TensorSpec((tokens, topk), "values", values=tuple(map(float, values)), dtype=torch.int64)
    weights = TensorSpec((tokens, topk), dtype=dtype) if probs else None
    return Sample((TensorSpec((count - dropped + unused, h), **how), row_map), {"probs": weights})


def _edge_cases_unpermute() -> list[Sample]:
    return [
        _unpermute_sample(5, 6, 2),
        _unpermute_sample(5, 6, 2, probs=False),
        _unpermute_sample(5, 6, 1),
        _unpermute_sample(6, 8, 3, dropped=4, unused=2),
        _unpermute_sample(6, 8, 3, dropped=4, unused=2, probs=False),
        _unpermute_sample(6, 8, 3, dropped=4, unused=4),  # as many rows as assignments
        _unpermute_sample(6, 8, 3, dropped=4, unused=4, probs=False),
        _unpermute_sample(6, 8, 3, dtype=torch.float32),
        _unpermute_sample(3, 8, 2, dropped=6, unused=1),
        _unpermute_sample(0, 4, 2),
        _unpermute_sample(4, 0, 2),
        _unpermute_sample(9, 10, 2, strided="last"),
        _unpermute_sample(9, 10, 2, strided="rows"),
        _unpermute_sample(257, 33, 4, dropped=5),
    ]


def _samples_unpermute() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        tokens, topk = draw(st.integers(1, 20)), draw(st.integers(1, 4))
        kw: dict[str, Any] = {"unused": draw(st.integers(1, 4)), "dropped": draw(st.integers(0, tokens))}
        kw |= {"probs": draw(st.booleans()), "strided": draw(st.sampled_from(["", "rows", "last"]))}
        return _unpermute_sample(tokens, draw(st.integers(1, 40)), topk, **kw)

    return call()


@hal.op(
    check=_check_unpermute,
    tol=WEIGHTED_TOL,
    samples=_samples_unpermute,
    edge_cases=_edge_cases_unpermute,
    grads=("rows", "probs"),
)
def unpermute(rows: Tensor, row_map: Tensor, *, probs: Tensor | None = None) -> Tensor:
    """The sum over j of probs[i, j] * rows[row_map[i, j]] for every token i: [t, h] in the rows' dtype.

    rows [n, h], row_map [t, k] int64 as `permute` returns it (no row twice; -1 adds nothing), probs [t, k] or None for
    1. Sums in float32. Rows that are not in row_map have a gradient of zero.
    """
    acc = torch.promote_types(rows.dtype, torch.float32)
    padded = torch.cat([rows.to(acc), rows.new_zeros(1, rows.shape[1], dtype=acc)])
    taken = padded[torch.where(row_map < 0, len(rows), row_map)]
    return (taken if probs is None else taken * probs.to(acc)[..., None]).sum(1).to(rows.dtype)
