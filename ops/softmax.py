"""scale_mask_softmax: the softmax of unfused attention, with scaling and masking in one pass.

Masked entries give exactly 0, even if an entire row is masked (as Megatron's CUDA kernel does; filling with -10000
would give a uniform row instead).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hal
from hal import Call, Sample, TensorSpec, Tol, require

from .attention import band_mask

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_OP = "scale_mask_softmax"


def _check(call: Call) -> None:
    x, mask = call.x, call.mask
    require(x.ndim == 4, _OP, "x of shape [b, n, sq, sk]", tuple(x.shape))
    require(math.isfinite(call.scale), _OP, "a finite scale", call.scale)
    if mask is not None:
        fits = mask.ndim <= 4 and all(m in (1, f) for m, f in zip(reversed(mask.shape), reversed(x.shape)))
        require(mask.dtype == torch.bool, _OP, "a bool mask (True = masked out)", mask.dtype)
        require(fits, _OP, f"a mask that broadcasts to {tuple(x.shape)}", tuple(mask.shape))


def _edge_cases() -> list[Sample]:
    def mask(*shape: int, p: float = 0.5) -> TensorSpec:
        return TensorSpec(shape, "bool", p=p, dtype=torch.bool)

    return [
        Sample((TensorSpec((2, 3, 5, 7)),)),
        Sample((TensorSpec((2, 3, 5, 5)),), {"causal": True, "scale": 0.5}),
        Sample((TensorSpec((1, 2, 3, 9)),), {"causal": True}),
        Sample((TensorSpec((1, 2, 9, 3)),), {"causal": True}),  # no column is visible to the first rows
        Sample((TensorSpec((2, 3, 4, 6)), mask(2, 1, 4, 6)), {"scale": 2.0}),
        Sample((TensorSpec((2, 3, 4, 6)), mask(4, 6, p=1.0))),
        Sample((TensorSpec((2, 3, 4, 6)), mask(2, 1, 1, 6)), {"causal": True}),
        Sample((TensorSpec((2, 2, 32, 64)), mask(2, 1, 32, 64)), {"scale": 0.5}),  # sizes that tiled kernels require
        Sample((TensorSpec((1, 2, 64, 32)), mask(64, 32)), {"causal": True}),
        Sample((TensorSpec((1, 1, 1, 1)),)),
        Sample((TensorSpec((0, 2, 3, 4)),)),
        Sample((TensorSpec((1, 2, 3, 0)),)),
        Sample((TensorSpec((2, 2, 3, 65), strided="last"),), {"scale": -1.0}),
        Sample((TensorSpec((1, 1, 3, 130), scale=100.0),)),  # large logits must not overflow
        Sample((TensorSpec((1, 1, 2, 3), "values", values=(float("nan"), 1, 2, float("inf"), 1, 2)),), grad=False),
        Sample((TensorSpec((1, 1, 2, 3), "values", values=(-float("inf"), 1, 2, 0, 1, 2)),)),
    ]


def _samples() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        b, n, sq, sk = (draw(st.integers(1, m)) for m in (3, 3, 20, 70))
        shape = draw(st.sampled_from([None, (sq, sk), (b, 1, sq, sk), (b, 1, 1, sk), (b, n, sq, sk)]))
        mask = (
            None if shape is None else TensorSpec(shape, "bool", p=draw(st.sampled_from([0.1, 0.9])), dtype=torch.bool)
        )
        kw = {"scale": draw(st.sampled_from([1.0, 0.125, 3.0])), "causal": draw(st.booleans())}
        return Sample((TensorSpec((b, n, sq, sk), strided=draw(st.sampled_from(["", "rows"]))), mask), kw)

    return call()


@hal.op(
    check=_check,
    tol={
        torch.float32: Tol(1e-6, 1.3e-5),  # exp of a difference of numbers up to 100 in the samples
        torch.bfloat16: Tol(1e-4, 1.6e-2),  # one rounding to 8 bits on the way out
        torch.float16: Tol(1e-4, 2e-3),  # one rounding to 11 bits; subnormals below 6e-5
    },
    samples=_samples,
    edge_cases=_edge_cases,
    grads=("x",),
)
def scale_mask_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False) -> Tensor:
    """softmax(scale * x) over the last dimension of x [b, n, sq, sk], masked entries 0, in x's dtype.

    mask: bool, True = masked out, broadcastable to x. causal: also masks j > i + sk - sq. A row with every entry
    masked gives 0. Statistics in float32.
    """
    s = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    masked = band_mask(x.shape[2], x.shape[3], None, 0, x.device) if causal else None
    if mask is not None:
        masked = mask if masked is None else mask | masked
    if masked is None:
        return torch.softmax(s, dim=-1).to(x.dtype)
    # softmax of an all -inf row is NaN, in value and gradient, so a dead row is computed on zeros and then dropped.
    dead = masked.expand(s.shape).all(-1, keepdim=True)
    y = torch.softmax(s.masked_fill(masked & ~dead, -math.inf).masked_fill(dead, 0.0), dim=-1)
    return y.masked_fill(dead, 0.0).to(x.dtype)
