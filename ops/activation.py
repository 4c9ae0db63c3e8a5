"""Activations of the MLP: swiglu, geglu and bias_gelu, each with the preceding linear layer's bias fused in.

gelu has three forms: "none" is x * Phi(x) by erf, "tanh" its usual approximation (Hendrycks, Gimpel, arXiv
1606.08415), "fast" is x * sigmoid(1.702 x) (the same paper; Ascend's fast_gelu). They differ by up to 0.0005 and 0.02.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

import hal
from hal import Call, Op, Sample, TensorSpec, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

GELUS = ("none", "tanh", "fast")

_TOL = {
    torch.float32: Tol(2e-6, 2e-6),  # exp or erf to ~2 ulp, times values up to ~4
    torch.bfloat16: Tol(1e-3, 1.6e-2),  # one rounding to 8 bits; the bias gradient sums rounded rows
    torch.float16: Tol(1e-3, 2e-3),
}

_P = ParamSpec("_P")


def require_bias(op: str, x: Tensor, bias: Tensor | None) -> None:
    """x [..., h], bias [h]."""
    require(
        x.ndim >= 1 and x.is_floating_point(), op, "a floating-point x of at least one dimension", (x.shape, x.dtype)
    )
    if bias is not None:
        require(bias.shape == x.shape[-1:], op, f"bias of shape {tuple(x.shape[-1:])}", tuple(bias.shape))
        require(bias.dtype == x.dtype, op, f"bias of x's dtype {x.dtype}", bias.dtype)


def require_even(op: str, x: Tensor) -> None:
    """x [..., 2h]."""
    require(x.ndim >= 1 and x.shape[-1] % 2 == 0, op, "an even last size (two halves)", tuple(x.shape))


def require_gelu(op: str, approximate: str) -> None:
    require(approximate in GELUS, op, f"approximate among {', '.join(GELUS)}", repr(approximate))


def _check_swiglu(call: Call) -> None:
    require_even("swiglu", call.x)
    require_bias("swiglu", call.x, call.bias)


def _check_geglu(call: Call) -> None:
    require_even("geglu", call.x)
    require_bias("geglu", call.x, call.bias)
    require_gelu("geglu", call.approximate)


def _check_bias_gelu(call: Call) -> None:
    require_bias("bias_gelu", call.x, call.bias)
    require_gelu("bias_gelu", call.approximate)


def _edge_cases(variants: tuple[dict[str, Any], ...]) -> list[Sample]:
    def calls(kw: dict[str, Any]) -> list[Sample]:
        return [
            Sample((TensorSpec((3, 8)),), kw),
            Sample((TensorSpec((5, 2, 34)), TensorSpec((34,))), kw),
            Sample((TensorSpec((0, 8)), TensorSpec((8,))), kw),
            Sample((TensorSpec((7, 6), strided="last"), TensorSpec((6,))), kw),
            Sample((TensorSpec((2, 3, 70), strided="rows"),), kw),
            Sample((TensorSpec((4, 16), scale=30.0),), kw),  # both tails
            Sample((TensorSpec((200, 4)), TensorSpec((4,))), kw),  # the bias gradient is a long sum
            Sample((TensorSpec((1, 4), "values", values=(float("nan"), 1.0, 2.0, -1.0)),), kw, grad=False),
        ]

    return [sample for kw in variants for sample in calls(kw)]


def _samples(variants: tuple[dict[str, Any], ...]) -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        lead = tuple(draw(st.lists(st.integers(1, 9), max_size=2)))
        width = 2 * draw(st.integers(1, 40))
        bias = TensorSpec((width,)) if draw(st.booleans()) else None
        x = TensorSpec((*lead, width), strided=draw(st.sampled_from(["", "rows", "last"])))
        return Sample((x, bias), draw(st.sampled_from(variants)))

    return call()


_PLAIN: tuple[dict[str, Any], ...] = ({},)
_APPROXIMATE: tuple[dict[str, Any], ...] = tuple({"approximate": a} for a in GELUS)


def _accumulate(x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., h] + bias [h] in the accumulation dtype: float32, or float64 for float64."""
    acc = torch.promote_types(x.dtype, torch.float32)
    return x.to(acc) if bias is None else x.to(acc) + bias.to(acc)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    """gelu of each element of x, in one of its three forms."""
    if approximate == "none":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    if approximate == "tanh":
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return x * torch.sigmoid(1.702 * x)


def _activation(
    check: Callable[[Call], None], variants: tuple[dict[str, Any], ...]
) -> Callable[[Callable[_P, Tensor]], Op[_P, Tensor]]:
    """Declares an activation of x + bias; variants: the options of its sample calls."""
    samples, edge_cases = partial(_samples, variants), partial(_edge_cases, variants)
    return hal.op(check=check, tol=_TOL, samples=samples, edge_cases=edge_cases, grads=("x", "bias"))


@_activation(_check_swiglu, _PLAIN)
def swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(a) * b, where a and b are the halves of x + bias. x [..., 2h], bias [2h]; result [..., h] in x's dtype.

    Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202; the first half is the gated one.
    """
    a, b = _accumulate(x, bias).chunk(2, dim=-1)
    return (F.silu(a) * b).to(x.dtype)


@_activation(_check_geglu, _APPROXIMATE)
def geglu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """gelu(a) * b, where a and b are the halves of x + bias. x [..., 2h], bias [2h]; result [..., h] in x's dtype."""
    a, b = _accumulate(x, bias).chunk(2, dim=-1)
    return (_gelu(a, approximate) * b).to(x.dtype)


@_activation(_check_bias_gelu, _APPROXIMATE)
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """gelu(x + bias) in x's dtype. x [..., h], bias [h]; approximate: "none" (erf), "tanh" or "fast"."""
    return _gelu(_accumulate(x, bias), approximate).to(x.dtype)
