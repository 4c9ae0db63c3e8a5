"""The ops of a mixture of experts in their plain form (kernels/moe.cl, and the products of linear.py per group).

Integers are planned on the host, where the tensors are: the places of rows, and what a capacity drops. The sums for
auxiliary losses, of a few numbers per token, are torch's too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.backend_tools import (
    RouterSpec,
    filled_groups,
    permute_backward,
    permuted_probs,
    router_from,
    unpermute_from,
)

from .device import OpenCL
from .engine import engine
from .linear import product
from .memory import KernelCall, Out
from .tensors import refuses


def _router_types(logits: Tensor, given: bool, spec: RouterSpec) -> dict[str, Any]:
    """The -D options of moe.cl for the router's kernels."""
    return {"T": logits.dtype, "KIND": spec.probability, "SELECTION": spec.selection, "GIVEN": int(given)}


def _grid(tokens: int) -> tuple[int]:
    """The grid of a kernel with a thread per token."""
    return (-(-tokens // engine().group),)


def _route(logits: Tensor, bias: Tensor | None, probs: Tensor, indices: Tensor, given: bool, spec: RouterSpec) -> None:
    """Writes probs [t, k] and, unless they are `given`, indices [t, k] for logits [t, e] and bias [e]."""
    rows, experts = logits.shape
    sizes = rows, experts, spec.topk, spec.groups, spec.group_topk
    results = Out(probs), Out(indices, update=True), spec.scale
    with KernelCall() as call:
        values = call.scratch(rows * (2 * experts + spec.groups))
        call.run(
            "moe", "router_fwd", _router_types(logits, given, spec), _grid(rows), logits, bias, values, *results, *sizes
        )


def _route_bwd(logits: Tensor, indices: Tensor, dprobs: Tensor, dlogits: Tensor, spec: RouterSpec) -> None:
    """Writes dlogits [t, e] for dprobs [t, k] and indices [t, k]."""
    types = _router_types(logits, True, spec)
    with KernelCall() as call:
        arguments = logits, indices, dprobs, Out(dlogits), spec.scale, *logits.shape, spec.topk
        call.run("moe", "router_bwd", types, _grid(len(logits)), *arguments)


moe_router, _router_bwd = router_from(_route, _route_bwd)
OpenCL.impl(ops.moe_router, id="opencl/cl", why_not=refuses(ops.moe_router, "logits", "expert_bias"), bwd=_router_bwd)(
    moe_router
)
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


def _gather(rows: Tensor, row_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, [t, h], for rows [n, h], row_map [t, k] and probs [t, k] (float32)."""
    out = torch.empty((len(row_map), rows.shape[1]), dtype=rows.dtype)
    if out.numel():
        with KernelCall() as call:
            sizes = row_map.shape[1], rows.shape[1]
            call.run("moe", "gather", _types(rows), (len(out),), rows, row_map, probs, Out(out), *sizes)
    return out


@OpenCL.impl(ops.permute, id="opencl/cl", why_not=refuses(ops.permute), bwd=permute_backward(_gather))
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
    return (rows, row_map, sizes, permuted_probs(probs, row_map, n)), (row_map,)


def _gather_bwd(rows: Tensor, row_map: Tensor, probs: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """drows [n, h] and dprobs [t, k] (None without probs) from dy [t, h]."""
    drows, dprobs = torch.zeros_like(rows), None if probs is None else torch.zeros_like(probs)
    if dy.numel():
        with KernelCall() as call:
            results = Out(drows, update=True), None if dprobs is None else Out(dprobs)
            sizes = row_map.shape[1], rows.shape[1]
            call.run("moe", "gather_bwd", _types(rows), (len(dy),), rows, row_map, probs, dy, *results, *sizes)
    return drows, dprobs


unpermute, _unpermute_bwd = unpermute_from(_gather, _gather_bwd)
OpenCL.impl(ops.unpermute, id="opencl/cl", why_not=refuses(ops.unpermute), bwd=_unpermute_bwd)(unpermute)


def _linear_bwd(
    residuals: tuple[Any, ...], dy: Tensor, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx [n, in] and dweight [e, out, in] from dy [n, out], as far as `needs` requires them."""
    x, weight, group_sizes = residuals
    dx = torch.empty(x.shape, dtype=x.dtype) if needs[0] else None
    dw = torch.zeros(weight.shape, dtype=weight.dtype) if needs[1] else None
    with KernelCall() as call:
        for expert, rows in filled_groups(group_sizes.tolist()):
            if dx is not None:
                product(call, dy[rows], weight[expert].t(), None, dx[rows])
            if dw is not None:
                product(call, dy[rows].t(), x[rows].t(), None, dw[expert])
    return dx, dw


@OpenCL.impl(ops.grouped_linear, id="opencl/cl", why_not=refuses(ops.grouped_linear), bwd=_linear_bwd)
def grouped_linear(x: Tensor, weight: Tensor, group_sizes: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    y = torch.empty((len(x), weight.shape[1]), dtype=x.dtype)
    with KernelCall() as call:
        for expert, rows in filled_groups(group_sizes.tolist()):
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
