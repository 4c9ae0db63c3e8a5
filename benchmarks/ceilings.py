"""What the machine can do at most, measured in the same rounds as the candidates.

A matrix product of a size that caches suit (oneDNN through torch, into memory that is not fresh), and a copy of memory
that no cache holds. Shares of the copy count the bytes an ideal kernel moves: inputs read once, outputs written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import worker
from .case import Call

_N = 1536
_BYTES = 128 << 20


@dataclass(frozen=True)
class Ceiling:
    """work: FLOP (unit "F") or bytes (unit "B") of one call of what `make` returns."""

    make: Callable[[], Call]
    work: float
    unit: str


def _gemm(dtype: torch.dtype) -> Call:
    a, b = (torch.randn(_N, _N, device=worker.device()).to(dtype) for _ in range(2))
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if a.device.type == "cpu" and dtype == torch.float32 and onednn is not None:
        return lambda: onednn(a, b, None, "none", [], "")
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _copy() -> Call:
    a = torch.zeros(_BYTES // 4, device=worker.device())
    b = torch.zeros_like(a)
    return lambda: b.copy_(a)


CEILINGS = {
    "GEMM f32": Ceiling(lambda: _gemm(torch.float32), 2.0 * _N**3, "F"),
    "GEMM bf16": Ceiling(lambda: _gemm(torch.bfloat16), 2.0 * _N**3, "F"),
    "copy": Ceiling(_copy, 2.0 * _BYTES, "B"),
}
