"""The ops of a mixture of experts in their plain form (kernels/moe.cl, and the products of linear.py per group).

Integers are planned on the host, where the tensors are: the places of rows, and what a capacity drops. The sums for
auxiliary losses, of a few numbers per token, are torch's too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hal import ops

from .device import OpenCL
from .engine import engine
from .linear import product
from .memory import KernelCall, Out
from .tensors import refuses

_LOGITS, _SIGMOID, _SOFTMAX = range(3)
"""The values whose largest are chosen (SELECTION in the kernel)."""

_OF_CHOSEN, _OF_ALL, _SIGMOIDS, _NORMALISED_SIGMOIDS = range(4)
"""KIND in the kernel."""


def _kind(score_function: str, pre_softmax: bool, topk: int) -> int:
    if score_function == "softmax":
        return _OF_ALL if pre_softmax else _OF_CHOSEN
    if topk == 1:
        return _SIGMOIDS
    return _NORMALISED_SIGMOIDS if score_function == "sigmoid" else _OF_ALL


def _router_bwd(residuals: tuple[Any, ...], dprobs: Tensor) -> tuple[Tensor]:
    """dlogits [t, e] from dprobs [t, k]."""
    logits, indices, types, scale = residuals
    dlogits = torch.empty_like(logits)
    if logits.numel():
        grid = (-(-len(logits) // engine().group),)
        with KernelCall() as call:
            arguments = (logits, indices, dprobs.contiguous(), Out(dlogits), float(scale), *logits.shape)
            call.run("moe", "router_bwd", types, grid, *arguments, indices.shape[1])
    return (dlogits,)


@OpenCL.impl(ops.moe_router, id="opencl/cl", why_not=refuses(ops.moe_router, "logits", "expert_bias"), bwd=_router_bwd)
def moe_router(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    expert_bias: Tensor | None = None,
    indices: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
    logits, groups = logits.contiguous(), num_groups or 0
    if score_function == "sinkhorn" and indices is None:
        # Its iteration is over all tokens; the kernel handles one at a time.
        indices = ops.moe_router.reference(logits, topk, score_function=score_function)[1]
    chosen = torch.empty((len(logits), topk), dtype=torch.int64) if indices is None else indices.clone().contiguous()
    probs = torch.empty(chosen.shape, dtype=logits.dtype)
    # Without groups and bias, every score function keeps the order of the logits.
    selection = _LOGITS
    if groups or expert_bias is not None:
        selection = _SIGMOID if score_function == "sigmoid" else _SOFTMAX if pre_softmax else _LOGITS
    kind = _kind(score_function, pre_softmax, topk)
    types = {"T": logits.dtype, "KIND": kind, "SELECTION": selection, "GIVEN": int(indices is not None)}
    if logits.numel():
        grid, (rows, experts) = (-(-len(logits) // engine().group),), logits.shape
        bias = None if expert_bias is None else expert_bias.contiguous()
        with KernelCall() as call:
            values = call.scratch(rows * (2 * experts + groups))
            results = Out(probs), Out(chosen, update=True)
            sizes = rows, experts, topk, groups, group_topk or 0
            call.run("moe", "router_fwd", types, grid, logits, bias, values, *results, float(scaling_factor), *sizes)
    return (probs, chosen), (logits, chosen, types, scaling_factor)


OpenCL.impl(ops.moe_balance_sums, id="opencl/torch", why_not=refuses(ops.moe_balance_sums))(
    ops.moe_balance_sums.reference
)
OpenCL.impl(ops.moe_drop, id="opencl/torch", why_not=refuses(ops.moe_drop, "probs"))(ops.moe_drop.reference)


def _types(x: Tensor) -> dict[str, Any]:
    """The -D options of moe.cl for kernels other than the router's."""
    return {"T": x.dtype, "KIND": 0, "SELECTION": 0, "GIVEN": 0}


def _plan(indices: Tensor, num_experts: int, capacity: int | None) -> tuple[Tensor, Tensor]:
    """row_map like indices [t, k], and the sizes of the groups [e]."""
    nothing = torch.empty(len(indices), 0)
    _, row_map, sizes = ops.permute.reference(nothing, indices, num_experts, capacity=capacity)
    return row_map, sizes


def _gather(rows: Tensor, row_map: Tensor, probs: Tensor | None) -> Tensor:
    """The sum of each token's rows, [t, h], for rows [n, h], row_map [t, k] and probs [t, k] (float32)."""
    rows = rows.contiguous()
    out = torch.empty((len(row_map), rows.shape[1]), dtype=rows.dtype)
    if out.numel():
        with KernelCall() as call:
            sizes = row_map.shape[1], rows.shape[1]
            call.run("moe", "gather", _types(rows), (len(out),), rows, row_map, probs, Out(out), *sizes)
    return out


def _permute_bwd(residuals: tuple[Any, ...], drows: Tensor, *dpermuted: Tensor) -> tuple[Tensor, Tensor | None]:
    """dx [t, h] from drows [n, h], and dprobs [t, k] from those of the rows [n]."""
    (row_map,) = residuals
    dx = _gather(drows, row_map, None)
    if not dpermuted:
        return dx, None
    return dx, torch.cat([dpermuted[0], dpermuted[0].new_zeros(1)])[row_map]  # -1 is the zero at the end


@OpenCL.impl(ops.permute, id="opencl/cl", why_not=refuses(ops.permute), bwd=_permute_bwd)
def permute(
    x: Tensor, indices: Tensor, num_experts: int, *, probs: Tensor | None = None, capacity: int | None = None
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    x = x.contiguous()
    row_map, sizes = _plan(indices, num_experts, capacity)
    n = indices.numel() if capacity is None else num_experts * capacity
    rows = torch.zeros((n, x.shape[1]), dtype=x.dtype)
    if x.numel() and rows.numel():
        with KernelCall() as call:
            arguments = (x, row_map, Out(rows, update=True), indices.shape[1], x.shape[1])
            call.run("moe", "scatter", _types(x), (len(x),), *arguments)
    if probs is None:
        return (rows, row_map, sizes), (row_map,)
    permuted = torch.zeros(n + 1, dtype=probs.dtype)
    permuted[torch.where(row_map < 0, n, row_map).flatten()] = probs.detach().flatten()
    return (rows, row_map, sizes, permuted[:n].clone()), (row_map,)


def _unpermute_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """drows [n, h] and dprobs [t, k] (None without probs) from dy [t, h]."""
    rows, row_map, weights, dtype = residuals
    drows, dprobs = torch.zeros_like(rows), None if weights is None else torch.zeros_like(weights)
    if dy.numel():
        with KernelCall() as call:
            results = Out(drows, update=True), None if dprobs is None else Out(dprobs)
            sizes = row_map.shape[1], rows.shape[1]
            inputs = rows, row_map, weights, dy.contiguous()
            call.run("moe", "gather_bwd", _types(rows), (len(dy),), *inputs, *results, *sizes)
    return drows, None if dprobs is None else dprobs.to(dtype)


@OpenCL.impl(ops.unpermute, id="opencl/cl", why_not=refuses(ops.unpermute), bwd=_unpermute_bwd)
def unpermute(rows: Tensor, row_map: Tensor, *, probs: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    rows, row_map = rows.contiguous(), row_map.contiguous()
    weights = None if probs is None else probs.detach().float().contiguous()
    return _gather(rows, row_map, weights), (rows, row_map, weights, None if probs is None else probs.dtype)


def _groups(group_sizes: Tensor) -> Iterator[tuple[int, slice]]:
    """Every expert that has rows, and its rows."""
    start = 0
    for expert, size in enumerate(group_sizes.tolist()):
        if size:
            yield expert, slice(start, start + size)
        start += size


def _linear_bwd(
    residuals: tuple[Any, ...], dy: Tensor, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx [n, in] and dweight [e, out, in] from dy [n, out], as far as `needs` requires them."""
    x, weight, group_sizes = residuals
    dx = torch.empty(x.shape, dtype=x.dtype) if needs[0] else None
    dw = torch.zeros(weight.shape, dtype=weight.dtype) if needs[1] else None
    with KernelCall() as call:
        for expert, rows in _groups(group_sizes):
            if dx is not None:
                product(call, dy[rows], weight[expert].t(), None, dx[rows])
            if dw is not None:
                product(call, dy[rows].t(), x[rows].t(), None, dw[expert])
    return dx, dw


@OpenCL.impl(ops.grouped_linear, id="opencl/cl", why_not=refuses(ops.grouped_linear), bwd=_linear_bwd)
def grouped_linear(x: Tensor, weight: Tensor, group_sizes: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    y = torch.empty((len(x), weight.shape[1]), dtype=x.dtype)
    with KernelCall() as call:
        for expert, rows in _groups(group_sizes):
            product(call, x[rows], weight[expert], None, y[rows])
    return y, (x, weight, group_sizes)


_refuses_wgrad = refuses(ops.grouped_linear_wgrad, "x", "dy", "main_grad")


@OpenCL.impl(ops.grouped_linear_wgrad, id="opencl/cl", why_not=_refuses_wgrad)
def grouped_linear_wgrad(x: Tensor, dy: Tensor, group_sizes: Tensor, main_grad: Tensor) -> None:
    # The product is float32: it is added before anything is rounded to x's dtype.
    _, dw = _linear_bwd((x.float(), main_grad, group_sizes), dy.float(), needs=(False, True))
    assert dw is not None
    main_grad += dw


def _swiglu_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx [n, 2h] and dprobs [n] from dy [n, h]."""
    x, weights, dtype = residuals
    dx, dprobs = torch.empty_like(x), torch.zeros_like(weights)
    if x.numel():
        with KernelCall() as call:
            arguments = (x, weights, dy.contiguous(), Out(dx), Out(dprobs), x.shape[1] // 2)
            call.run("moe", "weighted_bwd", _types(x), (len(x),), *arguments)
    return dx, dprobs.to(dtype)


@OpenCL.impl(ops.grouped_swiglu, id="opencl/cl", why_not=refuses(ops.grouped_swiglu), bwd=_swiglu_bwd)
def grouped_swiglu(x: Tensor, probs: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    x, weights = x.contiguous(), probs.detach().float().contiguous()
    y = torch.empty((len(x), x.shape[1] // 2), dtype=x.dtype)
    if y.numel():
        with KernelCall() as call:
            call.run("moe", "weighted_fwd", _types(x), (len(x),), x, weights, Out(y), y.shape[1])
    return y, (x, weights, probs.dtype)
