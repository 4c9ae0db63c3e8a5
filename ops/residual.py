"""bias_dropout_add: the end of every transformer sub-layer, in one pass over the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hal
from hal import Call, Rng, Sample, TensorSpec, Tol, require

from .random import keep_mask, require_probability

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_OP = "bias_dropout_add"


def _check(call: Call) -> None:
    x, bias, residual, rng = call.x, call.bias, call.residual, call.rng
    require(x.ndim >= 1 and x.shape == residual.shape, _OP, "x and residual of one shape", (x.shape, residual.shape))
    require(residual.dtype in (x.dtype, torch.float32), _OP, "residual in x's dtype or float32", residual.dtype)
    if bias is not None:
        require(bias.shape == x.shape[-1:], _OP, f"bias of shape {tuple(x.shape[-1:])}", tuple(bias.shape))
        require(bias.dtype == x.dtype, _OP, f"bias of x's dtype {x.dtype}", bias.dtype)
    require_probability(_OP, call.p, rng)
    if rng is not None:
        rng.indexing(x.shape)


def _edge_cases() -> list[Sample]:
    rng = Rng(21, 4)
    x = TensorSpec((3, 2, 10))
    return [
        Sample((x, None, x)),
        Sample((x, TensorSpec((10,)), x)),
        Sample((x, TensorSpec((10,)), x), {"p": 0.3, "rng": rng}),
        Sample((x, None, TensorSpec((3, 2, 10), dtype=torch.float32)), {"p": 0.5, "rng": rng}),
        Sample((TensorSpec((0, 10)), TensorSpec((10,)), TensorSpec((0, 10))), {"p": 0.5, "rng": rng}),
        Sample(
            (TensorSpec((5, 7), strided="last"), TensorSpec((7,)), TensorSpec((5, 7), strided="rows")),
            {"p": 0.5, "rng": rng},
        ),
        Sample((x, TensorSpec((10,)), x), {"p": 0.3, "rng": rng.block((6, 4, 20), (2, 1, 5))}),
        Sample((TensorSpec((130, 6)), TensorSpec((6,)), TensorSpec((130, 6))), {"p": 0.1, "rng": rng}),
    ]


def _samples() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        shape = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))
        strided = st.sampled_from(["", "rows", "last"])
        bias = TensorSpec(shape[-1:]) if draw(st.booleans()) else None
        kw = {"p": draw(st.sampled_from([0.0, 0.1, 0.7])), "rng": Rng(draw(st.integers(0, 2**40)))}
        return Sample((TensorSpec(shape, strided=draw(strided)), bias, TensorSpec(shape, strided=draw(strided))), kw)

    return call()


@hal.op(
    check=_check,
    tol={
        torch.float32: Tol(1e-6, 1e-6),  # two sums and a product; terms may cancel
        torch.bfloat16: Tol(1.6e-2, 1.6e-2),  # one rounding to 8 bits of a sum that may cancel
        torch.float16: Tol(2e-3, 2e-3),
    },
    samples=_samples,
    edge_cases=_edge_cases,
    grads=("x", "bias", "residual"),
)
def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float = 0.0, rng: Rng | None = None
) -> Tensor:
    """residual + dropout(x + bias). x, residual [..., h], bias [h] or None; the result has residual's dtype.

    Dropout is that of `hal.ops.dropout` (same bits); p = 0 in evaluation. Sums in float32.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc) if bias is None else x.to(acc) + bias.to(acc)
    if p > 0.0 and rng is not None:
        y = torch.where(keep_mask(x.shape, p, rng, x.device), y * (1.0 / (1.0 - p)), torch.zeros_like(y))
    return (residual.to(acc) + y).to(residual.dtype)
