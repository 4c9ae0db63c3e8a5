"""The experts: grouped_linear multiplies each group of rows with its expert's weight, grouped_linear_wgrad adds the
weight gradients to running sums, grouped_swiglu is the activation between two such products, weighted per row.

Shapes: n rows in e groups of adjacent rows, of any sizes; group i of group_sizes[i] rows belongs to expert i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hal
from hal import Call, Sample, TensorSpec, require

from .linear import PRODUCT_TOL
from .moe_permute import WEIGHTED_TOL

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_SIZES: tuple[tuple[int, ...], ...] = (
    (2, 3, 1),
    (0, 4, 0, 3),  # the first group is empty, and one between others
    (5, 0),
    (0, 0, 0),
    (7,),
    (1, 1, 1, 1, 1, 1, 1, 1),
    (33, 0, 70, 1, 16),
)


def _sizes(sizes: tuple[int, ...]) -> TensorSpec:
    return TensorSpec((len(sizes),), "values", values=tuple(map(float, sizes)), dtype=torch.int64)


def _require_groups(op: str, x: Tensor, sizes: Tensor, experts: int) -> None:
    """x [n, in], sizes [experts]."""
    require(x.ndim == 2, op, "x of shape [n, in]", tuple(x.shape))
    require(sizes.shape == (experts,), op, f"group_sizes of shape [{experts}]", tuple(sizes.shape))
    require(sizes.dtype == torch.int64, op, "int64 group_sizes", sizes.dtype)


def _group_of_rows(group_sizes: Tensor, x: Tensor) -> Tensor:
    """The group of each row of x [n, ...]: int64 [n]."""
    ends = group_sizes.to(x.device).cumsum(0)
    return torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)


def _check_linear(call: Call) -> None:
    op, x, weight = "grouped_linear", call.x, call.weight
    require(weight.ndim == 3, op, "weight of shape [experts, out, in]", tuple(weight.shape))
    _require_groups(op, x, call.group_sizes, len(weight))
    require(x.shape[1] == weight.shape[2], op, f"x of shape [n, {weight.shape[2]}]", tuple(x.shape))
    require(x.dtype == weight.dtype, op, f"x of weight's dtype {weight.dtype}", x.dtype)


def _linear_sample(sizes: tuple[int, ...], n_in: int, n_out: int, strided: str = "") -> Sample:
    x, weight = TensorSpec((sum(sizes), n_in), strided=strided), TensorSpec((len(sizes), n_out, n_in), strided=strided)
    return Sample((x, weight, _sizes(sizes)))


def _edge_cases_linear() -> list[Sample]:
    return [
        *(_linear_sample(sizes, 4, 5) for sizes in _SIZES),
        _linear_sample((3, 5), 17, 9, "rows"),
        _linear_sample((3, 5), 17, 9, "last"),
        _linear_sample((2, 3), 0, 5),
        _linear_sample((40, 3, 0, 90), 65, 130),
        _linear_sample((16, 33), 64, 96),
        # Rows of a multiple of 16 bytes, which torch's grouped_mm needs.
        _linear_sample((0, 5, 0, 17), 16, 24),
        _linear_sample((3, 1, 0), 24, 8, "last"),
    ]


def _draw_sizes(draw: Any) -> tuple[int, ...]:
    from hypothesis import strategies as st

    return tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 17]), min_size=1, max_size=6)))


def _samples_linear() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        strided = draw(st.sampled_from(["", "", "rows", "last"]))
        return _linear_sample(_draw_sizes(draw), draw(st.integers(1, 40)), draw(st.integers(1, 40)), strided)

    return call()


@hal.op(
    check=_check_linear, tol=PRODUCT_TOL, samples=_samples_linear, edge_cases=_edge_cases_linear, grads=("x", "weight")
)
def grouped_linear(x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
    """x_i weight[i]^T for every group x_i of rows: [n, out] in x's dtype, sums in float32.

    x [n, in], weight [e, out, in], group_sizes [e] int64 on x's device. An expert without rows has a gradient of zero.
    The sizes' sum is n; it may be less if the rows of x and of the upstream gradient after the last group are zero, as
    permute and unpermute leave them. The results in these rows are undefined.
    """
    group = _group_of_rows(group_sizes, x)
    y = x.new_zeros(len(x), weight.shape[1])
    for expert, matrix in enumerate(weight):
        y = y + torch.nn.functional.linear(torch.where((group == expert)[:, None], x, 0), matrix)
    return y


def _check_wgrad(call: Call) -> None:
    op, x, dy, main_grad = "grouped_linear_wgrad", call.x, call.dy, call.main_grad
    require(main_grad.ndim == 3, op, "main_grad of shape [experts, out, in]", tuple(main_grad.shape))
    _require_groups(op, x, call.group_sizes, len(main_grad))
    acc = torch.promote_types(x.dtype, torch.float32)
    require(main_grad.dtype == acc, op, f"main_grad of dtype {acc}", main_grad.dtype)
    require(x.shape[1] == main_grad.shape[2], op, f"x of shape [n, {main_grad.shape[2]}]", tuple(x.shape))
    shape = (len(x), main_grad.shape[1])
    require(dy.shape == shape, op, f"dy of shape {shape}", tuple(dy.shape))
    require(x.dtype == dy.dtype, op, f"dy of x's dtype {x.dtype}", dy.dtype)


def _wgrad_sample(sizes: tuple[int, ...], n_in: int, n_out: int, strided: str = "", sums_strided: str = "") -> Sample:
    x, dy = (TensorSpec((sum(sizes), width), strided=strided) for width in (n_in, n_out))
    main_grad = TensorSpec((len(sizes), n_out, n_in), dtype=torch.float32, strided=sums_strided)
    return Sample((x, dy, _sizes(sizes), main_grad))


def _edge_cases_wgrad() -> list[Sample]:
    return [
        *(_wgrad_sample(sizes, 4, 5) for sizes in _SIZES),
        _wgrad_sample((3, 5), 17, 9, "rows"),
        _wgrad_sample((3, 5), 17, 9, "last"),
        _wgrad_sample((3, 5), 17, 9, sums_strided="rows"),
        _wgrad_sample((3, 5), 17, 9, sums_strided="last"),
        _wgrad_sample((2, 3), 0, 5),
        _wgrad_sample((40, 0, 129), 210, 170),
    ]


def _samples_wgrad() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        return _wgrad_sample(_draw_sizes(draw), draw(st.integers(1, 40)), draw(st.integers(1, 40)))

    return call()


@hal.op(
    check=_check_wgrad, tol=PRODUCT_TOL, samples=_samples_wgrad, edge_cases=_edge_cases_wgrad, mutates=("main_grad",)
)
def grouped_linear_wgrad(x: Tensor, dy: Tensor, group_sizes: Tensor, main_grad: Tensor) -> None:
    """Adds the gradient of `grouped_linear(x, weight, group_sizes)`'s weight for the upstream gradient dy to main_grad.

    x [n, in], dy [n, out]; main_grad [e, out, in] is float32 (float64 for float64 x) and written in place:
    main_grad[i] += dy_i^T x_i. See `linear_wgrad`.
    """
    x, dy, main_grad = x.detach(), dy.detach(), main_grad.detach()
    group = _group_of_rows(group_sizes, x)
    for expert, total in enumerate(main_grad):
        total += torch.where((group == expert)[:, None], dy, 0).t() @ x


def _check_swiglu(call: Call) -> None:
    op, x, probs = "grouped_swiglu", call.x, call.probs
    require(x.ndim == 2 and x.shape[1] % 2 == 0, op, "x of shape [n, 2 * h]", tuple(x.shape))
    require(probs.shape == x.shape[:1], op, f"probs of shape [{len(x)}]", tuple(probs.shape))
    require(probs.dtype in (x.dtype, torch.float32), op, "probs in x's dtype or float32", probs.dtype)


def _swiglu_sample(n: int, h: int, dtype: torch.dtype | None = None, strided: str = "") -> Sample:
    return Sample((TensorSpec((n, 2 * h), strided=strided), TensorSpec((n,), dtype=dtype)))


def _edge_cases_swiglu() -> list[Sample]:
    return [
        _swiglu_sample(3, 4),
        _swiglu_sample(3, 4, torch.float32),
        _swiglu_sample(0, 4),
        _swiglu_sample(1, 1),
        _swiglu_sample(9, 33, strided="rows"),
        _swiglu_sample(9, 33, torch.float32, "last"),
        _swiglu_sample(130, 70, torch.float32),
        Sample((TensorSpec((4, 10), scale=30.0), TensorSpec((4,)))),
        Sample((TensorSpec((2, 4)), TensorSpec((2,), "values", values=(0.0, 1.0)))),
    ]


def _samples_swiglu() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        _swiglu_sample,
        st.integers(0, 20),
        st.integers(1, 40),
        st.sampled_from([None, torch.float32]),
        st.sampled_from(["", "rows", "last"]),
    )


@hal.op(
    check=_check_swiglu,
    tol=WEIGHTED_TOL,  # products of three numbers; the gradient of probs sums h of them
    samples=_samples_swiglu,
    edge_cases=_edge_cases_swiglu,
    grads=("x", "probs"),
)
def grouped_swiglu(x: Tensor, probs: Tensor) -> Tensor:
    """silu(a) * b * probs for x = [a, b] [n, 2h] and the rows' probs [n]: [n, h] in x's dtype, arithmetic in float32.

    megatron-core's weighted SwiGLU (megatron/core/fusions/fused_bias_swiglu.py), rounded once.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(acc).chunk(2, dim=-1)
    return (torch.nn.functional.silu(a) * b * probs.to(acc)[:, None]).to(x.dtype)
