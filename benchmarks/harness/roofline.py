"""The ceilings of the machine, measured in the same rounds as the candidates.

The ceilings are a matrix product of a size that suits the caches (oneDNN through torch, with its output in reused
memory), and a copy that exceeds all caches. Shares of the copy rate count the bytes that an ideal kernel moves, which
reads inputs once and writes outputs once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import target
from .case import Thunk

_N = 1536
_BYTES = 128 << 20


@dataclass(frozen=True)
class Ceiling:
    """work: FLOP (of a product) or bytes (of a copy) of one call of what `make` returns."""

    make: Callable[[], Thunk]
    work: float


def _gemm(dtype: torch.dtype) -> Thunk:
    a, b = (torch.randn(_N, _N, device=target.device()).to(dtype) for _ in range(2))
    # torch.mm calls MKL for float32, which is slower than oneDNN on processors that are not Intel's.
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if a.device.type == "cpu" and dtype == torch.float32 and onednn is not None:
        return lambda: onednn(a, b, None, "none", [], "")
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _copy() -> Thunk:
    a = torch.zeros(_BYTES // 4, device=target.device())
    b = torch.zeros_like(a)
    return lambda: b.copy_(a)


CEILINGS = {
    "GEMM f32": Ceiling(lambda: _gemm(torch.float32), 2.0 * _N**3),
    "GEMM bf16": Ceiling(lambda: _gemm(torch.bfloat16), 2.0 * _N**3),
    "copy": Ceiling(_copy, 2.0 * _BYTES),  # every byte is read and written
}
