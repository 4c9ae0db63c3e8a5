"""layer_norm and rms_norm over the last dimension, statistics in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ParamSpec

import torch
from torch import Tensor

import hal
from hal import Call, Op, Sample, TensorSpec, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_TOL = {
    torch.float32: Tol(1e-5, 1e-5),  # the mean of h terms and the square root, relative to values up to ~5
    torch.bfloat16: Tol(8e-3, 1.6e-2),  # one rounding to 8 bits; weight gradients sum rounded rows
    torch.float16: Tol(1e-3, 2e-3),
}

_P = ParamSpec("_P")


def require_weight(op: str, x: Tensor, name: str, w: Tensor, eps: float) -> None:
    """x [..., h], w [h]."""
    require(x.ndim >= 1 and w.shape == x.shape[-1:], op, f"{name} of shape {tuple(x.shape[-1:])}", tuple(w.shape))
    require(
        x.is_floating_point() and w.dtype in (x.dtype, torch.float32), op, f"{name} in x's dtype or float32", w.dtype
    )
    require(eps > 0, op, "eps > 0", eps)


def _check_layer_norm(call: Call) -> None:
    require_weight("layer_norm", call.x, "weight", call.weight, call.eps)
    require_weight("layer_norm", call.x, "bias", call.bias, call.eps)


def _check_rms_norm(call: Call) -> None:
    require_weight("rms_norm", call.x, "weight", call.weight, call.eps)


def _edge_cases(weights: int) -> list[Sample]:
    def call(*shape: int, grad: bool = True, weight_dtype: torch.dtype | None = None, **kw: object) -> Sample:
        x = TensorSpec(shape, **kw)  # type: ignore[arg-type]
        return Sample((x, *[TensorSpec(shape[-1:], dtype=weight_dtype)] * weights), grad=grad)

    return [
        call(4, 8),
        # With one column the gradient of x is 0; what is computed is rounding error times rstd, which eps bounds.
        Sample((TensorSpec((3, 1)), *[TensorSpec((1,))] * weights), {"eps": 0.01}),
        call(8),
        call(0, 8),
        call(2, 3, 129),
        call(5, 33, strided="last"),
        call(2, 4, 16, strided="rows"),
        call(3, 64, weight_dtype=torch.float32),
        call(3, 40, scale=1e3),
        call(2, 8, scale=0.0),  # constant rows: the variance is 0 and eps decides
        call(300, 12),  # many rows: the weight gradient is a long sum
        call(1, 4, dist="values", values=(1.0, float("nan"), 2.0, 3.0), grad=False),
        call(1, 4, dist="values", values=(1.0, float("inf"), 2.0, 3.0), grad=False),
    ]


def _samples(weights: int) -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        lambda lead, width, strided, eps: Sample(
            (TensorSpec((*lead, width), strided=strided), *[TensorSpec((width,))] * weights), {"eps": eps}
        ),
        st.lists(st.integers(1, 12), max_size=2),
        st.integers(4, 150),  # with fewer columns the gradient is often rounding error only
        st.sampled_from(["", "rows", "last"]),
        st.sampled_from([1e-5, 1e-6, 1e-3]),
    )


def _norm(check: Callable[[Call], None], *parameters: str) -> Callable[[Callable[_P, Tensor]], Op[_P, Tensor]]:
    """Declares a norm of x with these parameters [width]."""
    samples, edge_cases = partial(_samples, len(parameters)), partial(_edge_cases, len(parameters))
    return hal.op(check=check, tol=_TOL, samples=samples, edge_cases=edge_cases, grads=("x", *parameters))


@_norm(_check_layer_norm, "weight", "bias")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (biased variance). x [..., h], result alike.

    Source: Ba, Kiros, Hinton, "Layer normalization", arXiv 1607.06450.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    xa = x.to(acc)
    centred = xa - xa.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * rstd * weight.to(acc) + bias.to(acc)).to(x.dtype)


@_norm(_check_rms_norm, "weight")
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., h], result alike.

    Source: Zhang, Sennrich, "Root mean square layer normalization", arXiv 1910.07467.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    xa = x.to(acc)
    rstd = torch.rsqrt(xa.square().mean(-1, keepdim=True) + eps)
    return (xa * rstd * weight.to(acc)).to(x.dtype)
