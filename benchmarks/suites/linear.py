"""Linear layers against torch.mm, forward and backward, at the shapes of the training suite's GPT and larger ones.

The backward pass consists of two products, for the gradients of the input and of the weight. It is timed separately, on
a retained graph. "wgrad" accumulates the gradient of a further microbatch into a weight's float32 gradient, against
addmm_ (bfloat16: torch.mm and add_).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from hal import ops

from ..harness import target
from ..harness.case import OURS, Candidate, Case, Thunk
from ..harness.thunks import forward

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_SHAPES = ((2048, 384, 1536), (2048, 1536, 384), (2048, 384, 8192), (2048, 1024, 1024), (2048, 2048, 2048))
"""(rows, inputs, outputs) of the layers."""
_ODD = ((1000, 1000, 10), (777, 768, 65), (3000, 17, 2304))
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def _ours() -> Linear:
    return ops.linear


def _torch() -> Linear:
    return F.linear


def _medium() -> Linear:
    torch.set_float32_matmul_precision("medium")
    return F.linear


def _layer(make: Callable[[], Linear], dtype: str, shape: tuple[int, int, int], backward: bool) -> Thunk:
    linear, (rows, n_in, n_out) = make(), shape
    x, w = (torch.randn(n, n_in, device=target.device(), dtype=_DTYPES[dtype]) for n in (rows, n_out))
    if not backward:
        return forward(lambda x, w: linear(x, w, None), (x, w))
    y = linear(x.requires_grad_(), w.requires_grad_(), None)
    dy = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True)


def _wgrad(dtype: str, shape: tuple[int, int, int], ours: bool) -> Thunk:
    rows, n_in, n_out = shape
    x, dy = (torch.randn(rows, n, device=target.device(), dtype=_DTYPES[dtype]) for n in (n_in, n_out))
    main_grad = torch.zeros(n_out, n_in, device=target.device())
    if ours:
        return lambda: ops.linear_wgrad(x, dy, main_grad)
    if dtype == "f32":
        return lambda: main_grad.addmm_(dy.t(), x)
    return lambda: main_grad.add_(dy.t() @ x)


def _case(
    name: str,
    dtype: str,
    shape: tuple[int, int, int],
    candidates: dict[str, Candidate],
    allocators: tuple[str, ...],
    products: int = 1,
) -> Case:
    """products: the number of matrix products of this shape per call."""
    rows, n_in, n_out = shape
    return Case(
        name,
        f"{dtype} {rows}x{n_in} -> {n_out}",
        candidates,
        work=2.0 * rows * n_in * n_out * products,
        ceiling=f"GEMM {dtype}",
        allocators=allocators,
    )


def cases() -> list[Case]:
    """Every shape, forward, backward and wgrad, float32 and bfloat16; float32 also in odd shapes."""
    makers: dict[str, tuple[Callable[[], Linear], str]] = {
        OURS: (_ours, "hal"),
        "torch.mm": (_torch, "torch"),
        "torch.mm medium": (_medium, "medium"),
    }
    result = []
    for dtype, (mode, backward) in product(_DTYPES, (("fwd", False), ("bwd", True))):
        # "medium" allows float32 products to run in bfloat16; it does not affect bfloat16 products.
        of_dtype = {n: m for n, m in makers.items() if dtype == "f32" or n != "torch.mm medium"}
        for title, shapes in (("linear", _SHAPES), ("odd linear", _ODD if dtype == "f32" else ())):
            for shape in shapes:
                candidates = {
                    name: Candidate(partial(_layer, make, dtype, shape, backward), process)
                    for name, (make, process) in of_dtype.items()
                }
                allocators = ("default", "pooled") if title == "linear" else ("default",)
                result.append(_case(f"{title} {mode}", dtype, shape, candidates, allocators, 2 if backward else 1))
    for dtype, shape in product(_DTYPES, _SHAPES):
        candidates = {
            OURS: Candidate(partial(_wgrad, dtype, shape, True), "hal"),
            "torch.mm": Candidate(partial(_wgrad, dtype, shape, False), "torch"),
        }
        result.append(_case("linear wgrad", dtype, shape, candidates, ("pooled",)))
    return result
