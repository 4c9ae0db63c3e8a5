"""merge_attention: the result of attention over two sets of keys from the results over each, as a ring of ranks needs.

Source: Liu et al., "Ring attention with blockwise transformers", arXiv 2310.01889; the weights are those of the online
softmax, Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hal
from hal import Call, Sample, TensorSpec, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_OP = "merge_attention"


def _check(call: Call) -> None:
    out, part = call.out, call.part
    require(out.ndim == 4, _OP, "out [s, b, n, d]", tuple(out.shape))
    require(part.shape == out.shape, _OP, f"part of out's shape {tuple(out.shape)}", tuple(part.shape))
    s, b, n, _ = out.shape
    for name in ("lse", "part_lse"):
        shape = getattr(call, name).shape
        require(shape == (b, n, s), _OP, f"{name} of shape {(b, n, s)} (b, n, s)", tuple(shape))
    accumulated = torch.promote_types(part.dtype, torch.float32)
    for name in ("out", "lse", "part_lse"):
        dtype = getattr(call, name).dtype
        require(dtype == accumulated, _OP, f"{name} in {accumulated} beside part in {part.dtype}", dtype)


def _call(
    s: int, b: int, n: int, d: int, strided: str = "", *, scale: float = 1.0, lse_scale: float = 3.0,
    seen: tuple[bool, bool] = (True, True),
) -> Sample:  # fmt: skip
    """seen: whether the rows see keys in out, and in part; scale: of both, whose rows without keys should be 0."""
    single = torch.float32
    tensors = []
    for dtype, any_keys in zip((single, None), seen):
        tensors.append(TensorSpec((s, b, n, d), dtype=dtype, strided=strided, scale=scale))
        if any_keys:
            tensors.append(TensorSpec((b, n, s), dtype=single, scale=lse_scale))
        else:
            tensors.append(TensorSpec((b, n, s), "values", values=(-math.inf,) * (b * n * s), dtype=single))
    return Sample(tuple(tensors))


def _edge_cases() -> list[Sample]:
    return [
        _call(1, 1, 1, 1),
        _call(5, 2, 3, 8),
        _call(0, 2, 3, 8),
        _call(5, 2, 3, 7, "last"),
        _call(5, 2, 3, 8, "rows"),
        _call(130, 1, 2, 16),
        _call(3, 2, 2, 4, lse_scale=200.0),  # the shares are 0 and 1
        _call(4, 1, 2, 8, seen=(False, True)),
        _call(4, 1, 2, 8, seen=(True, False)),
        _call(4, 1, 2, 8, seen=(False, False), scale=0.0),
    ]


def _samples() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        _call,
        st.integers(1, 40),
        st.integers(1, 3),
        st.integers(1, 5),
        st.integers(1, 40) | st.just(64),
        st.sampled_from(["", "rows", "last"]),
    )


def _merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """out and part [s, b, n, d], lse and part_lse [b, n, s]."""
    total = torch.logaddexp(lse, part_lse)

    def share(of: Tensor) -> Tensor:
        """[s, b, n, 1]; 0 for rows without visible keys."""
        of_sum = torch.where(total == -math.inf, torch.zeros_like(total), torch.exp(of - total))
        return of_sum.permute(2, 0, 1)[..., None]

    return out * share(lse) + part * share(part_lse), total


# Shares are exponents of differences of up to ~10, which float32 rounds to 1e-6. A part in 16 bits is exact in float32.
_TOL = Tol(1e-5, 1e-5)


@hal.op(
    check=_check,
    tol={torch.float32: _TOL, torch.bfloat16: _TOL, torch.float16: _TOL},
    samples=_samples,
    edge_cases=_edge_cases,
    decompose=_merged,
)
def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of both of two results of `flash_attention(layout="SBND", return_lse=True)`.

    out: what was accumulated so far, float32 [s, b, n, d]; part: the next result, of the same shape in any dtype. lse
    and part_lse: their log-sum-exps, float32 [b, n, s]. The keys of the two must be disjoint. Each result is normalised
    by its own sum, so both are multiplied by their share of the sum of both, exp(lse - log(exp(lse) + exp(part_lse))).
    A row without visible keys has lse -inf and out 0, in the arguments and in the results. There are no gradients: a
    ring's backward pass forms those of its blocks (model/parallel/context_parallel.py).
    """
    return _merged(out, lse, part, part_lse)
