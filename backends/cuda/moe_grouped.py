"""grouped_linear and grouped_linear_wgrad by torch's grouped_mm, else by one product per group; grouped_swiglu
(kernels/moe.cu).

grouped_mm reads the sizes of the groups on the device; one product per group needs them on the host, and waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, ops
from hal.backend_tools import filled_groups

from . import launch
from .device import Cuda
from .linear import linear_wgrad
from .tensors import LANES, TYPE, aligned, dense, reasons, refuses, threads_for


def _grouped_mm_refusals(x: Tensor, experts: int, n_out: int, n_in: int) -> list[str]:
    """Reasons why grouped_mm cannot multiply x [n, n_in] by weights [experts, n_out, n_in]."""
    refusals = list(reasons(x))
    if not hasattr(torch.nn.functional, "grouped_mm"):
        refusals.append("a torch without grouped_mm (2.10 and later have it)")
    if x.dtype in LANES and (n_in % LANES[x.dtype] or n_out % LANES[x.dtype]):
        refusals.append(f"sizes {n_in} and {n_out} (grouped_mm needs rows of a multiple of 16 bytes)")
    if not (len(x) and n_in and n_out and experts):
        refusals.append("an empty product (grouped_mm needs an element)")
    return refusals


def _why_not(call: Call) -> Sequence[str]:
    return _grouped_mm_refusals(call.x, *call.weight.shape)


def _ends(group_sizes: Tensor) -> Tensor:
    return group_sizes.cumsum(0).to(torch.int32)


def _linear_bwd(residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:
    """dx [n, in] and dweight [e, out, in] from dy [n, out], as far as `needs` requires them."""
    x, weight, ends = residuals
    dy, multiply = dense(dy), torch.nn.functional.grouped_mm
    dx = multiply(dy, weight, offs=ends) if needs[0] else None
    return dx, multiply(dy.t(), x, offs=ends) if needs[1] else None


@Cuda.impl(ops.grouped_linear, id="cuda/grouped_mm", why_not=_why_not, bwd=_linear_bwd)
def grouped_linear(x: Tensor, weight: Tensor, group_sizes: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    x, weight, ends = dense(x), dense(weight), _ends(group_sizes)
    return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends), (x, weight, ends)


def _with_sizes_on_host(why_not: Callable[[Call], Sequence[str]]) -> Callable[[Call], Sequence[str]]:
    """`why_not`, and a reason in a graph that is being captured, where the host cannot read the sizes of the groups."""

    def refusals(call: Call) -> Sequence[str]:
        given = list(why_not(call))
        if launch.capturing():
            given.append("a CUDA graph is being captured (one product per group needs the sizes on the host)")
        return given

    return refusals


def _loop_bwd(residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x [n, in] and weight [e, out, in] for dy [n, out], one product per group."""
    x, weight, group_sizes = residuals
    dx, dweight = torch.empty_like(x) if needs[0] else None, torch.zeros_like(weight) if needs[1] else None
    for expert, rows in filled_groups(group_sizes.tolist()):
        if dx is not None:
            dx[rows] = dy[rows] @ weight[expert]
        if dweight is not None:
            dweight[expert] = dy[rows].t() @ x[rows]
    return dx, dweight


@Cuda.impl(ops.grouped_linear, id="cuda/loop", why_not=_with_sizes_on_host(refuses(ops.grouped_linear)), bwd=_loop_bwd)
def grouped_linear_by_loop(x: Tensor, weight: Tensor, group_sizes: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    y = torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
    for expert, rows in filled_groups(group_sizes.tolist()):
        y[rows] = torch.nn.functional.linear(x[rows], weight[expert])
    return y, (x, weight, group_sizes)


@Cuda.impl(
    ops.grouped_linear_wgrad,
    id="cuda/loop",
    why_not=_with_sizes_on_host(refuses(ops.grouped_linear_wgrad, "x", "dy", "main_grad")),
)
def grouped_linear_wgrad(x: Tensor, dy: Tensor, group_sizes: Tensor, main_grad: Tensor) -> None:
    # grouped_mm rounds the product to x's dtype, so it would lose what main_grad is for.
    for expert, rows in filled_groups(group_sizes.tolist()):
        linear_wgrad(x[rows], dy[rows], main_grad[expert])


def _swiglu_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx [n, 2h] and dprobs [n] from dy [n, h]."""
    x, weights, dtype = residuals
    dy, dx, dprobs = dense(dy), torch.empty_like(x), torch.zeros_like(weights)
    if x.numel():
        _swiglu("weighted_swiglu_bwd", x, (weights, dy, dx, dprobs), dy, dx)
    return dx, dprobs.to(dtype)


def _swiglu(kernel: str, x: Tensor, others: tuple[Tensor, ...], *rows: Tensor) -> None:
    """Launches a kernel on x [n, 2h]; rows: those of `others` that are read 16 bytes at a time."""
    n, h, lanes = len(x), x.shape[1] // 2, LANES[x.dtype]
    vec = h % lanes == 0 and aligned(x, *rows)
    launch.run(
        f"{kernel}<{TYPE[x.dtype]}>",
        (launch.blocks(n), 1),
        threads_for(-(-h // (lanes if vec else 1))),
        x,
        *others,
        n,
        h,
        int(vec),
    )


@Cuda.impl(ops.grouped_swiglu, id="cuda/kernel", why_not=refuses(ops.grouped_swiglu), bwd=_swiglu_bwd)
def grouped_swiglu(x: Tensor, probs: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    x, weights = x.contiguous(), probs.detach().float().contiguous()
    y = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype, device=x.device)
    if y.numel():
        _swiglu("weighted_swiglu_fwd", x, (weights, y), y)
    return y, (x, weights, probs.dtype)
