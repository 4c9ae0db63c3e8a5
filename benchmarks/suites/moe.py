"""Mixture of experts: the router against eager torch, permutation against the copy rate, and grouped products against a
loop of F.linear and against oneDNN's products alone.

Groups are balanced, or have sizes in proportion to 1, 1/2, 1/3, ... (Zipf). The loop of F.linear ends with one tensor
of all rows, as grouped_linear does; "oneDNN" is only the products, without writing them side by side, and is absent
where torch lacks it. The backward pass is both gradients, on a retained graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hal import ops

from ..harness import target
from ..harness.case import OURS, Candidate, Case, Thunk
from ..harness.thunks import forward, forward_backward

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_BALANCED = (4, 16, 32, 64, 256)
"""Rows per group."""
_EXPERTS, _IN, _OUT = 16, 1024, 1408
_ZIPF = 1024
"""Rows of all groups together."""


def _zipf(rows: int) -> list[int]:
    total = sum(1.0 / (i + 1) for i in range(_EXPERTS))
    sizes = [int(rows / (i + 1) / total) for i in range(_EXPERTS)]
    sizes[0] += rows - sum(sizes)
    return sizes


def _loop(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.cat([F.linear(rows, w) for rows, w in zip(torch.split_with_sizes(x, list(sizes)), weight)])


def _grouped(dtype: str, sizes: Sequence[int], ours: bool, backward: bool) -> Thunk:
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), _IN, device=target.device(), dtype=_DTYPES[dtype])
    weight = torch.randn(len(sizes), _OUT, _IN, device=target.device(), dtype=_DTYPES[dtype])
    counts = torch.tensor(sizes, device=target.device())
    function = partial(ops.grouped_linear, group_sizes=counts) if ours else partial(_loop, sizes=sizes)
    if not backward:
        return forward(function, (x, weight))
    y = function(x.requires_grad_(), weight.requires_grad_())
    dy = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)


def _onednn(dtype: str, sizes: Sequence[int]) -> Thunk:
    x = torch.randn(sum(sizes), _IN, dtype=_DTYPES[dtype])
    weight = torch.randn(len(sizes), _OUT, _IN, dtype=_DTYPES[dtype])
    product = torch.ops.mkldnn._linear_pointwise.default
    groups = list(zip(torch.split_with_sizes(x, list(sizes)), weight))
    return lambda: [product(rows, w, None, "none", [], "") for rows, w in groups]


def _products() -> list[Case]:
    result = []
    shapes = {f"{rows} rows per group": [rows] * _EXPERTS for rows in _BALANCED} | {f"Zipf, {_ZIPF} rows": _zipf(_ZIPF)}
    for dtype in _DTYPES:
        for shape, sizes in shapes.items():
            for mode, backward in (("fwd", False), ("bwd", True)):
                candidates = {
                    OURS: Candidate(partial(_grouped, dtype, sizes, True, backward), "hal"),
                    "F.linear loop": Candidate(partial(_grouped, dtype, sizes, False, backward)),
                }
                if not backward:
                    candidates["oneDNN"] = Candidate(partial(_onednn, dtype, sizes), "onednn")
                case = Case(
                    f"grouped_linear {mode}",
                    f"{dtype} {shape}, {_EXPERTS} of {_IN} -> {_OUT}",
                    candidates,
                    work=2.0 * sum(sizes) * _IN * _OUT * (2 if backward else 1),
                    ceiling=f"GEMM {dtype}",
                    allocators=("pooled",),
                )
                result.append(case)
    return result


_TOKENS, _HIDDEN, _TOPK = 2048, 2048, 4


def _rows(dtype: str) -> tuple[Tensor, Tensor]:
    """Tokens and the experts that they are assigned to."""
    torch.manual_seed(0)
    x = torch.randn(_TOKENS, _HIDDEN, device=target.device(), dtype=_DTYPES[dtype])
    return x, torch.randint(0, _EXPERTS, (_TOKENS, _TOPK), device=target.device())


def _permute(dtype: str, ours: bool) -> Thunk:
    x, indices = _rows(dtype)
    if ours:
        return forward(lambda x: ops.permute(x, indices, _EXPERTS)[0], (x,))
    return forward(lambda x: x.index_select(0, indices.flatten().sort(stable=True).indices // _TOPK), (x,))


def _unpermute(dtype: str, ours: bool) -> Thunk:
    x, indices = _rows(dtype)
    rows, row_map, _ = ops.permute.reference(x, indices, _EXPERTS)
    if ours:
        return forward(lambda rows: ops.unpermute(rows, row_map), (rows,))
    return forward(lambda rows: rows[row_map].sum(1), (rows,))


def _permutations() -> list[Case]:
    makers: dict[str, Callable[[str, bool], Thunk]] = {"permute": _permute, "unpermute": _unpermute}
    return [
        Case(
            name,
            f"{dtype} {_TOKENS}x{_HIDDEN}, {_TOPK} of {_EXPERTS}",
            {
                OURS: Candidate(partial(make, dtype, True), "hal"),
                "eager": Candidate(partial(make, dtype, False)),
            },
            work=float(_DTYPES[dtype].itemsize * _TOKENS * _HIDDEN * (1 + _TOPK)),
            ceiling="copy",
            allocators=("pooled",),
        )
        for dtype in _DTYPES
        for name, make in makers.items()
    ]


def _router(ours: bool, experts: int, topk: int, grouped: bool, backward: bool) -> Thunk:
    torch.manual_seed(0)
    logits = torch.randn(8192, experts, device=target.device())
    how: dict[str, Any] = {"score_function": "sigmoid", "num_groups": 8, "group_topk": 4} if grouped else {}
    function = ops.moe_router if ours else ops.moe_router.reference

    def probs(logits: Tensor) -> Tensor:
        return function(logits, topk, **how)[0]

    return forward_backward(probs, (logits,), 1) if backward else forward(probs, (logits,))


def _routers() -> list[Case]:
    return [
        Case(
            f"moe_router {mode}",
            f"f32 8192 tokens, {topk} of {experts}{' in 8 groups' if grouped else ''}",
            {
                OURS: Candidate(partial(_router, True, experts, topk, grouped, backward), "hal"),
                "eager": Candidate(partial(_router, False, experts, topk, grouped, backward)),
            },
            allocators=("pooled",),
        )
        for experts, topk, grouped in ((8, 2, False), (64, 6, False), (256, 8, True))
        for mode, backward in (("fwd", False), ("fwd+bwd", True))
    ]


def cases() -> list[Case]:
    """Routers, permutations and grouped products."""
    return [*_routers(), *_permutations(), *_products()]
