"""linear: x w^T + b; linear_wgrad: accumulates the weight and bias gradients of linear into running sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hal
from hal import Call, Sample, TensorSpec, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

PRODUCT_TOL = {
    torch.float32: Tol(2e-5, 1e-5),  # sums of up to 130 products of normal numbers; ~sqrt(130) * 2^-24 each
    torch.bfloat16: Tol(5e-2, 1.6e-2),  # one rounding to 8 bits of values up to ~30
    torch.float16: Tol(1e-2, 2e-3),
}
"""Tolerances of a matrix product."""


def _check(call: Call) -> None:
    x, weight, bias = call.x, call.weight, call.bias
    require(weight.ndim == 2, "linear", "weight of shape [out, in]", tuple(weight.shape))
    require(
        x.ndim >= 1 and x.shape[-1] == weight.shape[1], "linear", f"x of shape [..., {weight.shape[1]}]", tuple(x.shape)
    )
    require(x.dtype == weight.dtype, "linear", f"x of weight's dtype {weight.dtype}", x.dtype)
    if bias is not None:
        require(bias.shape == weight.shape[:1], "linear", f"bias of shape {tuple(weight.shape[:1])}", tuple(bias.shape))
        require(bias.dtype == weight.dtype, "linear", f"bias of weight's dtype {weight.dtype}", bias.dtype)


def _edge_cases() -> list[Sample]:
    return [
        Sample((TensorSpec((3, 4)), TensorSpec((5, 4)), TensorSpec((5,)))),
        Sample((TensorSpec((2, 3, 17)), TensorSpec((9, 17)))),
        Sample((TensorSpec((4,)), TensorSpec((5, 4)), TensorSpec((5,)))),
        Sample((TensorSpec((0, 4)), TensorSpec((5, 4)), TensorSpec((5,)))),
        Sample((TensorSpec((3, 0)), TensorSpec((5, 0)), TensorSpec((5,)))),
        Sample((TensorSpec((6, 8), strided="rows"), TensorSpec((3, 8), strided="rows"))),
        Sample((TensorSpec((6, 8), strided="last"), TensorSpec((3, 8), strided="last"), TensorSpec((3,)))),
        Sample((TensorSpec((6, 8)), TensorSpec((5, 8)), TensorSpec((5,), strided="last"))),
        Sample((TensorSpec((64, 64)), TensorSpec((64, 64)), TensorSpec((64,), strided="last"))),
        Sample((TensorSpec((130, 65)), TensorSpec((33, 65)), TensorSpec((33,)))),
    ]


def _samples() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        lead = tuple(draw(st.lists(st.integers(1, 12), max_size=2)))
        n_in, n_out = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        return Sample(
            (
                TensorSpec((*lead, n_in)),
                TensorSpec((n_out, n_in)),
                TensorSpec((n_out,)) if draw(st.booleans()) else None,
            )
        )

    return call()


@hal.op(check=_check, tol=PRODUCT_TOL, samples=_samples, edge_cases=_edge_cases, grads=("x", "weight", "bias"))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias in x's dtype, sums in float32. x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return torch.nn.functional.linear(x, weight, bias)


def _check_wgrad(call: Call) -> None:
    x, dy, main_grad, main_bias_grad = call.x, call.dy, call.main_grad, call.main_bias_grad
    name, acc = "linear_wgrad", torch.promote_types(x.dtype, torch.float32)
    require(x.ndim >= 1 and dy.ndim >= 1, name, "x [..., in] and dy [..., out]", (tuple(x.shape), tuple(dy.shape)))
    require(x.shape[:-1] == dy.shape[:-1], name, f"dy of shape [{tuple(x.shape[:-1])}, out]", tuple(dy.shape))
    require(x.dtype == dy.dtype, name, f"dy of x's dtype {x.dtype}", dy.dtype)
    shape = (dy.shape[-1], x.shape[-1])
    require(main_grad.shape == shape, name, f"main_grad of shape {shape}", tuple(main_grad.shape))
    require(main_grad.dtype == acc, name, f"main_grad of dtype {acc}", main_grad.dtype)
    if main_bias_grad is not None:
        require(
            main_bias_grad.shape == shape[:1], name, f"main_bias_grad of shape {shape[:1]}", tuple(main_bias_grad.shape)
        )
        require(main_bias_grad.dtype == acc, name, f"main_bias_grad of dtype {acc}", main_bias_grad.dtype)


def _wgrad_sample(
    lead: tuple[int, ...], n_in: int, n_out: int, bias: bool, strided: str = "", sums_strided: str = ""
) -> Sample:
    how: Any = {"dtype": torch.float32, "strided": sums_strided}
    sums = [TensorSpec((n_out, n_in), **how), TensorSpec((n_out,), **how) if bias else None]
    return Sample((TensorSpec((*lead, n_in), strided=strided), TensorSpec((*lead, n_out), strided=strided), *sums))


def _edge_cases_wgrad() -> list[Sample]:
    return [
        _wgrad_sample((3,), 4, 5, True),
        _wgrad_sample((2, 3), 17, 9, False),
        _wgrad_sample((), 4, 5, True),
        _wgrad_sample((0,), 4, 5, True),
        _wgrad_sample((3,), 0, 5, True),
        _wgrad_sample((6,), 8, 3, True, "rows"),
        _wgrad_sample((6,), 8, 3, True, "last"),
        _wgrad_sample((6,), 8, 3, True, sums_strided="rows"),
        _wgrad_sample((6,), 8, 3, True, sums_strided="last"),
        _wgrad_sample((129,), 210, 170, True),  # large enough for a separate kernel, an odd number of tokens
    ]


def _samples_wgrad() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    lead = st.lists(st.integers(1, 12), max_size=2).map(tuple)
    return st.builds(_wgrad_sample, lead, st.integers(1, 40), st.integers(1, 40), st.booleans())


@hal.op(
    check=_check_wgrad,
    tol=PRODUCT_TOL,  # a backend may round the product to 16 bits before it adds it
    samples=_samples_wgrad,
    edge_cases=_edge_cases_wgrad,
    mutates=("main_grad", "main_bias_grad"),
)
def linear_wgrad(x: Tensor, dy: Tensor, main_grad: Tensor, main_bias_grad: Tensor | None = None) -> None:
    """Adds the gradients of `linear(x, weight, bias)`'s weight and bias for the upstream gradient dy to running sums.

    x [..., in], dy [..., out]; main_grad [out, in] and main_bias_grad [out] are float32 (float64 for float64 x) and
    written in place: main_grad += dy^T x, main_bias_grad += the sum of dy's rows. What Megatron's
    gradient_accumulation_fusion calls wgrad_gemm_accum_fp32, with the bias.
    """
    count = math.prod(x.shape[:-1])
    rows, dy_rows = x.detach().reshape(count, x.shape[-1]), dy.detach().reshape(count, dy.shape[-1])
    main_grad, main_bias_grad = main_grad.detach(), None if main_bias_grad is None else main_bias_grad.detach()
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(dy_rows.t(), rows)
    else:
        main_grad += dy_rows.t() @ rows
    if main_bias_grad is not None:
        main_bias_grad += dy_rows.sum(0, dtype=main_bias_grad.dtype)
