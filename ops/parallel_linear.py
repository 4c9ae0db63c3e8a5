"""Products of tensor-parallel layers with their communication: all_gather_linear and linear_reduce_scatter.

With sequence parallelism a column-parallel layer gathers the rows of its input, and a row-parallel layer reduces and
scatters those of its result (Korthikanti et al., arXiv 2205.05198, section 4.2.2). As one call, a backend can transfer
some rows while it multiplies others. The gradient of the input of each is the other, with the weight transposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hal
from hal import Call, Comm, Sample, TensorSpec, Tol, require

from .linear import linear
from .mappings import all_gather_to_region, reduce_scatter_from_region

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_TOL = {
    # Results of order 1 (weights with a standard deviation of in^-0.5). In the second op every rank rounds a partial
    # sum of up to ~4, by 2^-9 * 4 in bfloat16, and the transport rounds their sum: 3.2e-2 allows for four of these.
    torch.float32: Tol(1e-5, 1e-5),
    torch.bfloat16: Tol(3.2e-2, 1.6e-2),
    torch.float16: Tol(4e-3, 2e-3),
}


def _require_product(op: str, x: Tensor, weight: Tensor) -> None:
    """x [s, ..., in], weight [out, in]."""
    require(weight.ndim == 2, op, "weight of shape [out, in]", tuple(weight.shape))
    fits = x.ndim >= 2 and x.shape[-1] == weight.shape[1]
    require(fits, op, f"x of shape [s, ..., {weight.shape[1]}], two dimensions or more", tuple(x.shape))
    require(x.dtype == weight.dtype, op, f"x of weight's dtype {weight.dtype}", x.dtype)


def _ranks(comm: Comm | None) -> int:
    return 1 if comm is None else comm.size


def _product_call(
    lead: tuple[int, ...], n_in: int, n_out: int, bias: bool | None = None, strided: str = ""
) -> tuple[TensorSpec | None, ...]:
    """x [*lead, in], weight [out, in] and, unless `bias` is None, bias [out] or None; results of order 1."""
    weight = TensorSpec((n_out, n_in), scale=max(1, n_in) ** -0.5, strided=strided)
    product = TensorSpec((*lead, n_in), strided=strided), weight
    return product if bias is None else (*product, TensorSpec((n_out,), scale=0.5) if bias else None)


def _check_gather(call: Call) -> None:
    op, bias, weight = "all_gather_linear", call.bias, call.weight
    _require_product(op, call.x, weight)
    if bias is not None:
        require(bias.shape == weight.shape[:1], op, f"bias of shape {tuple(weight.shape[:1])}", tuple(bias.shape))
        require(bias.dtype == weight.dtype, op, f"bias of weight's dtype {weight.dtype}", bias.dtype)


def _edge_cases_gather() -> list[Sample]:
    return [
        Sample(_product_call((3,), 4, 5, True)),
        Sample(_product_call((2, 3), 17, 9, False), {"return_gathered": True}),
        Sample(_product_call((3, 1, 2), 8, 4, True)),
        Sample(_product_call((0,), 4, 5, True), {"return_gathered": True}),
        Sample(_product_call((3,), 0, 5, True)),
        Sample(_product_call((6,), 8, 3, False, "rows"), {"return_gathered": True}),
        Sample(_product_call((6,), 8, 3, True, "last")),
        Sample(_product_call((130,), 65, 34, True)),
    ]


def _samples_gather() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        lambda lead, n_in, n_out, bias, gathered: Sample(
            _product_call(tuple(lead), n_in, n_out, bias), {"return_gathered": gathered}
        ),
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
        st.integers(1, 40),
        st.integers(1, 40),
        st.booleans(),
        st.booleans(),
    )


def _compose_gather(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, comm: Comm | None = None, return_gathered: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """x [s / ranks, ..., in], weight [out, in], bias [out]."""
    rows = all_gather_to_region(x, comm)
    y = linear(rows, weight, bias)
    # With one rank the gathered rows are x itself, and the result of an op shares no memory with its arguments.
    return (y, rows.detach().clone() if rows is x else rows.detach()) if return_gathered else y


@hal.op(
    check=_check_gather,
    tol=_TOL,
    samples=_samples_gather,
    edge_cases=_edge_cases_gather,
    grads=("x", "weight", "bias"),
    nondiff_outputs=(1,),
    decompose=_compose_gather,
    parts=(linear,),
)
def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, comm: Comm | None = None, return_gathered: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """linear of the rows of all ranks: x [s / ranks, ..., in], weight [out, in], bias [out] -> [s, ..., out].

    x is this rank's part of the first dimension, the same number of rows on every rank of `comm`; weight and bias are
    this rank's own, so that the gradient of x is the sum over the ranks, reduced and scattered. return_gathered:
    (the result, the gathered rows [s, ..., in], without a gradient). With a comm of None or of one rank nothing is
    communicated.
    """
    rows = all_gather_to_region(x, comm)
    y = linear.reference(rows, weight, bias)
    return (y, rows.detach().clone()) if return_gathered else y


def _check_scatter(call: Call) -> None:
    op, ranks = "linear_reduce_scatter", _ranks(call.comm)
    _require_product(op, call.x, call.weight)
    rows = call.x.shape[0]
    require(rows % ranks == 0, op, f"a first dimension of x that the {ranks} ranks divide", rows)


def _edge_cases_scatter() -> list[Sample]:
    return [
        Sample(_product_call((3,), 4, 5)),
        Sample(_product_call((2, 3), 17, 9)),
        Sample(_product_call((3, 1, 2), 8, 4)),
        Sample(_product_call((0,), 4, 5)),
        Sample(_product_call((3,), 0, 5)),
        Sample(_product_call((6,), 8, 3, strided="rows")),
        Sample(_product_call((6,), 8, 3, strided="last")),
        Sample(_product_call((130,), 65, 34)),
    ]


def _samples_scatter() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        lambda lead, n_in, n_out: Sample(_product_call(tuple(lead), n_in, n_out)),
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
        st.integers(1, 40),
        st.integers(1, 40),
    )


def _compose_scatter(x: Tensor, weight: Tensor, *, comm: Comm | None = None) -> Tensor:
    """x [s, ..., in], weight [out, in]."""
    return reduce_scatter_from_region(linear(x, weight), comm)


@hal.op(
    check=_check_scatter,
    tol=_TOL,
    samples=_samples_scatter,
    edge_cases=_edge_cases_scatter,
    grads=("x", "weight"),
    decompose=_compose_scatter,
    parts=(linear,),
)
def linear_reduce_scatter(x: Tensor, weight: Tensor, *, comm: Comm | None = None) -> Tensor:
    """This rank's rows of the sum over the ranks of linear(x, weight): x [s, ..., in], weight [out, in] ->
    [s / ranks, ..., out].

    Each rank of `comm` passes its own x and weight, of the same shapes; the ranks must divide s. The gradient of the
    result is gathered. A bias belongs to what follows, because here each rank would add it. With a comm of None or of
    one rank nothing is communicated.
    """
    return reduce_scatter_from_region(linear.reference(x, weight), comm)
