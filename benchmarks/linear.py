"""Linear layers against torch.mm, forward and backward, at the shapes of the training suite's GPT and larger ones.

The backward pass is both products: the input's gradient and the weight's (with it alone timed, on a retained graph).
"wgrad" is what a further microbatch adds to a weight's float32 gradient, against addmm_ (bfloat16: torch.mm and add_).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

import hal

from . import worker
from .case import OURS, Call, Candidate, Case

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_SHAPES = ((2048, 384, 1536), (2048, 1536, 384), (2048, 384, 8192), (2048, 1024, 1024), (2048, 2048, 2048))
_ODD = ((1000, 1000, 10), (777, 768, 65), (3000, 17, 2304))
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def _ours() -> Linear:
    return hal.ops.linear  # type: ignore[no-any-return]


def _torch() -> Linear:
    return F.linear


def _medium() -> Linear:
    torch.set_float32_matmul_precision("medium")
    return F.linear


def _call(make: Callable[[], Linear], dtype: str, rows: int, n_in: int, n_out: int, backward: bool) -> Call:
    linear = make()
    x, w = (torch.randn(n, n_in, device=worker.device(), dtype=_DTYPES[dtype]) for n in (rows, n_out))
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return linear(x, w, None)

        return forward
    y = linear(x.requires_grad_(), w.requires_grad_(), None)
    dy = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True)


def _sums(make: Callable[[], Linear], dtype: str, rows: int, n_in: int, n_out: int, ours: bool) -> Call:
    make()
    x, dy = (torch.randn(rows, n, device=worker.device(), dtype=_DTYPES[dtype]) for n in (n_in, n_out))
    main_grad = torch.zeros(n_out, n_in, device=worker.device())
    if ours:
        return lambda: hal.ops.linear_wgrad(x, dy, main_grad)
    if dtype == "f32":
        return lambda: main_grad.addmm_(dy.t(), x)
    return lambda: main_grad.add_(dy.t() @ x)


def _wgrad_cases() -> list[Case]:
    found = []
    for dtype, (rows, n_in, n_out) in product(_DTYPES, _SHAPES):
        candidates = {
            name: Candidate(lambda m=make, d=dtype, s=(rows, n_in, n_out), o=ours: _sums(m, d, *s, o), process)
            for name, make, process, ours in ((OURS, _ours, "hal", True), ("torch.mm", _torch, "torch", False))
        }
        shape, work = f"{dtype} {rows}x{n_in} -> {n_out}", 2.0 * rows * n_in * n_out
        found.append(
            Case("linear wgrad", shape, candidates, work=work, ceiling=f"GEMM {dtype}", allocators=("pooled",))
        )
    return found


def cases() -> list[Case]:
    """Every shape, forward, backward and wgrad, float32 and bfloat16; float32 also in shapes that fit no tile."""
    peers: dict[str, tuple[Callable[[], Linear], str]] = {
        OURS: (_ours, "hal"),
        "torch.mm": (_torch, "torch"),
        "torch.mm medium": (_medium, "medium"),
    }
    found = []
    for dtype in _DTYPES:
        for (mode, backward), (title, shapes) in product(
            (("fwd", False), ("bwd", True)), (("linear", _SHAPES), ("odd linear", _ODD if dtype == "f32" else ()))
        ):
            for shape in shapes:
                candidates = {
                    name: Candidate(lambda m=make, d=dtype, s=shape, b=backward: _call(m, d, *s, b), process)
                    for name, (make, process) in peers.items()
                    if dtype == "f32" or name != "torch.mm medium"
                }
                rows, n_in, n_out = shape
                found.append(
                    Case(
                        f"{title} {mode}",
                        f"{dtype} {rows}x{n_in} -> {n_out}",
                        candidates,
                        work=2.0 * rows * n_in * n_out * (2 if backward else 1),
                        ceiling=f"GEMM {dtype}",
                        allocators=("default", "pooled") if title == "linear" else ("default",),
                    )
                )
    return found + _wgrad_cases()
