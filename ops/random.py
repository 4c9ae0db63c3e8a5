"""Random draws: philox_uniform and dropout, bit-equal on every backend.

The tolerance is 0: the integers are defined by Philox4x32-10 (see hal/rng.py), the float is (bits >> 8) * 2**-24, and
dropout compares integers, so there is no rounding in which backends could differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hal
from hal import Call, Rng, Sample, TensorSpec, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_MASK = 0xFFFFFFFF


def philox_bits(index: Tensor, rng: Rng) -> Tensor:
    """Philox4x32-10 words (int64 in [0, 2**32)) of the elements `index` (int64) of the draw at `rng`.

    Source: Salmon et al., SC 2011, table 2 (multipliers and Weyl constants of Philox4x32).
    """
    counter = index // 4 + (rng.offset if rng.offset < 1 << 63 else rng.offset - (1 << 64))
    c0, c1, c2, c3 = counter & _MASK, (counter >> 32) & _MASK, torch.zeros_like(index), torch.zeros_like(index)
    k0, k1 = rng.seed & _MASK, rng.seed >> 32
    for _ in range(10):
        # int64 products wrap modulo 2**64, and the masks read them as unsigned.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    word = index % 4
    return torch.where(word == 0, c0, torch.where(word == 1, c1, torch.where(word == 2, c2, c3)))


def element_index(shape: Sequence[int], rng: Rng, device: torch.device | str | None = None) -> Tensor:
    """The element index in the draw of each coordinate, int64 of `shape` (rng may be a block of a larger draw)."""
    start, strides = rng.indexing(shape)
    index = torch.full(tuple(shape), start, dtype=torch.int64, device=device)
    for dim, (n, stride) in enumerate(zip(shape, strides)):
        index += (torch.arange(n, device=device) * stride).view(-1, *[1] * (len(shape) - dim - 1))
    return index


def keep_mask(shape: Sequence[int], p: float, rng: Rng, device: torch.device | str | None = None) -> Tensor:
    """Boolean tensor, True where dropout with probability `p` keeps the element."""
    bits = philox_bits(element_index(shape, rng, device), rng)
    return (bits >> 8) >= hal.dropout_threshold(p)


def require_probability(op: str, p: float, rng: Rng | None) -> None:
    """Raises ContractError unless 0 <= p < 1, and p > 0 comes with an rng."""
    require(0.0 <= p < 1.0, op, "a dropout probability in [0, 1)", p)
    require(p == 0.0 or rng is not None, op, "an rng, because dropout is on", "rng=None", "Pass rng=hal.Rng(seed).")


def _check_uniform(call: Call) -> None:
    shape, op = tuple(call.shape), "philox_uniform"
    require(all(n >= 0 for n in shape), op, "a shape without negative sizes", shape)
    # torch counts bytes and strides in 64-bit integers, those of empty tensors as if their sizes of 0 were 1.
    require(math.prod(max(n, 1) for n in shape) < 1 << 61, op, "a shape of less than 2**61 elements", shape)
    call.rng.indexing(call.shape)


def _edge_cases_uniform() -> list[Sample]:
    return [
        Sample(((),), {"rng": Rng(0)}),
        Sample(((0, 3),), {"rng": Rng(1)}),
        Sample(((5, 7),), {"rng": Rng(2**64 - 1, 2**64 - 2)}),  # the counter wraps
        Sample(((6,),), {"rng": Rng(3, 2**32 - 1)}),  # the counter carries into its high word
        Sample(((5, 5),), {"rng": Rng(7, 11).block((9, 13), (4, 6))}),
    ]


def _samples_uniform() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    u64 = st.integers(0, 2**64 - 1)
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    return st.builds(lambda shape, seed, off: Sample((shape,), {"rng": Rng(seed, off)}), shapes, u64, u64)


@hal.op(
    check=_check_uniform,
    tol={torch.float32: Tol(0.0, 0.0)},  # integers: there is nothing to round
    samples=_samples_uniform,
    edge_cases=_edge_cases_uniform,
)
def philox_uniform(shape: Sequence[int], rng: Rng, *, device: torch.device | None = None) -> Tensor:
    """Uniform float32 in [0, 1), multiples of 2**-24, of `shape` on `device` (default: the active backend's)."""
    where = hal.device() if device is None else device
    return (philox_bits(element_index(shape, rng, where), rng) >> 8).to(torch.float32) * 2.0**-24


def _check_dropout(call: Call) -> None:
    require_probability("dropout", call.p, call.rng)
    if call.rng is not None:
        call.rng.indexing(call.x.shape)


def _edge_cases_dropout() -> list[Sample]:
    rng = Rng(5, 9)
    return [
        Sample((TensorSpec((4, 6)), 0.0, None)),
        Sample((TensorSpec((0, 6)), 0.5, rng)),
        Sample((TensorSpec((3, 5), strided="last"), 0.5, rng)),
        Sample((TensorSpec((7,)), 0.999, rng)),
        Sample((TensorSpec((2, 3, 5)), 0.3, rng.block((4, 3, 8), (1, 0, 3)))),
        Sample((TensorSpec((4,), "values", values=(float("inf"), float("nan"), 1.0, -2.0)), 0.5, rng), grad=False),
    ]


def _samples_dropout() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        lambda shape, p, seed: Sample((TensorSpec(tuple(shape)), p, Rng(seed, 3))),
        st.lists(st.integers(1, 9), min_size=1, max_size=4),
        st.floats(0.0, 0.95),
        st.integers(0, 2**64 - 1),
    )


@hal.op(
    check=_check_dropout,
    tol={  # one multiplication by 1/(1-p); the mask itself is exact
        torch.float32: Tol(0.0, 2.4e-7),
        torch.bfloat16: Tol(0.0, 7.9e-3),
        torch.float16: Tol(6e-8, 9.8e-4),
        torch.float64: Tol(0.0, 4.5e-16),
    },
    samples=_samples_dropout,
    edge_cases=_edge_cases_dropout,
    grads=("x",),
)
def dropout(x: Tensor, p: float, rng: Rng | None) -> Tensor:
    """x with each element dropped (set to 0) with probability p, the kept ones times 1/(1-p). Any shape.

    p = 0 returns x unchanged. The gradient uses the same mask, redrawn from rng.
    """
    if p == 0.0 or rng is None:
        return x.clone()
    return torch.where(keep_mask(x.shape, p, rng, x.device), x * (1.0 / (1.0 - p)), torch.zeros_like(x))
