"""linear: x w^T + b, the op most of a GPT's arithmetic is in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hal
from hal import Sample, T, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def _check(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    require(weight.ndim == 2, "linear", "weight of shape [out, in]", tuple(weight.shape))
    require(
        x.ndim >= 1 and x.shape[-1] == weight.shape[1], "linear", f"x of shape [..., {weight.shape[1]}]", tuple(x.shape)
    )
    require(x.dtype == weight.dtype, "linear", f"x of weight's dtype {weight.dtype}", x.dtype)
    if bias is not None:
        require(bias.shape == weight.shape[:1], "linear", f"bias of shape {tuple(weight.shape[:1])}", tuple(bias.shape))
        require(bias.dtype == weight.dtype, "linear", f"bias of weight's dtype {weight.dtype}", bias.dtype)


def _directed() -> list[Sample]:
    return [
        Sample((T((3, 4)), T((5, 4)), T((5,)))),
        Sample((T((2, 3, 17)), T((9, 17)))),
        Sample((T((4,)), T((5, 4)), T((5,)))),
        Sample((T((0, 4)), T((5, 4)), T((5,)))),
        Sample((T((3, 0)), T((5, 0)), T((5,)))),
        Sample((T((6, 8), strided="rows"), T((3, 8), strided="rows"))),
        Sample((T((6, 8), strided="last"), T((3, 8), strided="last"), T((3,)))),
        Sample((T((6, 8)), T((5, 8)), T((5,), strided="last"))),
        Sample((T((64, 64)), T((64, 64)), T((64,), strided="last"))),
        Sample((T((130, 65)), T((33, 65)), T((33,)))),
    ]


def _samples() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        lead = tuple(draw(st.lists(st.integers(1, 12), max_size=2)))
        n_in, n_out = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        return Sample((T((*lead, n_in)), T((n_out, n_in)), T((n_out,)) if draw(st.booleans()) else None))

    return call()


@hal.op(
    check=_check,
    tol={
        torch.float32: Tol(2e-5, 1e-5),  # sums of up to 130 products of normal numbers; ~sqrt(130) * 2^-24 each
        torch.bfloat16: Tol(5e-2, 1.6e-2),  # one rounding to 8 bits of values up to ~30
        torch.float16: Tol(1e-2, 2e-3),
    },
    samples=_samples,
    directed=_directed,
    grads=("x", "weight", "bias"),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias in x's dtype, sums in float32. x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return torch.nn.functional.linear(x, weight, bias)
