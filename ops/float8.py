"""scaled_linear: x w^T of float8 tensors with scales, the product of float8 training and inference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hal
from hal import Call, DtypeSpec, Sample, TensorSpec, Tol, require

from .linear import linear

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The dtypes of Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433."""

BLOCK = 128
"""Adjacent elements that share a scale in scales by block (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""


def blocks(size: int) -> int:
    """The number of blocks of a dimension; the last one may be smaller."""
    return -(-size // BLOCK)


def _check(call: Call) -> None:
    op, x, weight = "scaled_linear", call.x, call.weight
    require(weight.ndim == 2, op, "weight of shape [out, in]", tuple(weight.shape))
    out, n_in = weight.shape
    require(x.ndim >= 1 and x.shape[-1] == n_in, op, f"x of shape [..., {n_in}]", tuple(x.shape))
    for name, t in (("x", x), ("weight", weight)):
        require(t.dtype in FLOAT8, op, f"{name} of dtype float8_e4m3fn or float8_e5m2", t.dtype)
    shapes = {
        "x_scale": ((), (*x.shape[:-1], 1), (*x.shape[:-1], blocks(n_in))),
        "weight_scale": ((), (out, 1), (out, blocks(n_in)), (blocks(out), blocks(n_in))),
    }
    for name, allowed in shapes.items():
        scale = getattr(call, name)
        if tuple(scale.shape) not in allowed:  # symbolic shapes compare, but neither hash nor print
            listed = " or ".join(map(str, dict.fromkeys(allowed)))
            require(False, op, f"{name} of shape {listed}", tuple(scale.shape))
        require(scale.dtype == torch.float32, op, f"{name} of dtype float32", scale.dtype)
    known = (torch.float32, torch.bfloat16, torch.float16)
    require(call.dtype in known, op, "dtype float32, bfloat16 or float16", call.dtype)


def _call(
    lead: tuple[int, ...],
    n_in: int,
    n_out: int,
    scales: str = "tensor",
    formats: tuple[torch.dtype, torch.dtype] = (torch.float8_e4m3fn, torch.float8_e4m3fn),
    strided: str = "",
) -> Sample:
    """scales: "tensor", "row", "block" (1 x 128 of x, 128 x 128 of the weight) or "vector" (1 x 128 of both).

    Values are of order 1, and so is the result, because the weight's scales are about n_in^-0.5.
    """
    shapes = {
        "tensor": ((), ()),
        "row": ((*lead, 1), (n_out, 1)),
        "block": ((*lead, blocks(n_in)), (blocks(n_out), blocks(n_in))),
        "vector": ((*lead, blocks(n_in)), (n_out, blocks(n_in))),
    }[scales]
    x, weight = (
        TensorSpec(shape, dtype=dtype, strided=strided) for shape, dtype in zip(((*lead, n_in), (n_out, n_in)), formats)
    )
    x_scale, weight_scale = (
        TensorSpec(shape, scale=scale, dtype=torch.float32) for shape, scale in zip(shapes, (1.0, max(1, n_in) ** -0.5))
    )
    return Sample((x, weight, x_scale, weight_scale), {"dtype": DtypeSpec()})


def _edge_cases() -> list[Sample]:
    e4m3, e5m2 = FLOAT8
    return [
        _call((32,), 64, 48),  # sizes that products of tensor cores take
        _call((32,), 64, 48, "row"),
        _call((3,), 4, 5),
        _call((), 17, 9, "row"),
        _call((2, 3), 300, 140, "block"),  # the last block of both dimensions is not full
        _call((5,), 300, 140, "vector"),
        _call((2, 3), 128, 256, "block"),
        _call((64,), 32, 16, formats=(e5m2, e4m3)),  # gradients in float8
        _call((16,), 144, 32, "row", formats=(e4m3, e5m2)),
        _call((3,), 33, 5, formats=(e5m2, e5m2)),
        _call((0,), 4, 5, "row"),
        _call((3,), 0, 5),
        _call((6,), 140, 3, "block", strided="rows"),
        _call((6,), 140, 3, "vector", strided="last"),
    ]


def _samples() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        _call,
        st.lists(st.integers(1, 12), max_size=2).map(tuple),
        st.one_of(st.integers(1, 40), st.integers(120, 300), st.integers(1, 10).map(lambda n: 16 * n)),
        st.one_of(st.integers(1, 40), st.integers(120, 150), st.integers(1, 5).map(lambda n: 16 * n)),
        st.sampled_from(["tensor", "row", "block", "vector"]),
        st.sampled_from([(a, b) for a in FLOAT8 for b in FLOAT8]),
    )


def dequantize(x: Tensor, scale: Tensor, acc: torch.dtype = torch.float32) -> Tensor:
    """x times its scale, in `acc`. x [..., n] and scale as in `scaled_linear`."""
    return x.detach().to(acc) * spread(scale.detach(), x).to(acc)


def spread(scale: Tensor, x: Tensor) -> Tensor:
    """A scale of x as a tensor that broadcasts with x: every scale of a block once per element."""
    for dim in range(-scale.ndim, 0):
        if scale.shape[dim] not in (1, x.shape[dim]):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, x.shape[dim])
    return scale


def _compose(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    return linear(dequantize(x, x_scale), dequantize(weight, weight_scale)).to(dtype)


@hal.op(
    check=_check,
    tol={
        # The tolerances are those of results of order 1, whatever the number of summands. Tensor cores of sm_89 and
        # sm_90 add float8 products with about 13 bits after the binary point of the largest of them, and partial sums
        # over up to 128 elements in float32: four truncated steps of 2^-13 for each of `in` / 128 partial sums, whose
        # sizes and signs make them no more than those of one.
        torch.float32: Tol(5e-4, 5e-4),
        torch.bfloat16: Tol(1e-2, 1.6e-2),  # and one rounding of the result
        torch.float16: Tol(2e-3, 2e-3),
    },
    samples=_samples,
    edge_cases=_edge_cases,
    decompose=_compose,
    parts=(linear,),
)
def scaled_linear(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """(x x_scale) (weight weight_scale)^T in `dtype` (float32, bfloat16, float16), sums in float32: [..., out].

    x [..., in] and weight [out, in] are float8_e4m3fn or float8_e5m2, each of either. Scales are float32 and multiply:
    x_scale is [] (one for the tensor), [..., 1] (one per row) or [..., ceil(in / 128)] (one per 128 elements of a row);
    weight_scale is [], [out, 1], [out, ceil(in / 128)] or [ceil(out / 128), ceil(in / 128)] (one per 128 x 128
    elements). No argument has a gradient: the gradients of training are further calls, of tensors in float8.
    """
    acc = torch.promote_types(dtype, torch.float32)
    return linear.reference(dequantize(x, x_scale, acc), dequantize(weight, weight_scale, acc)).to(dtype)
