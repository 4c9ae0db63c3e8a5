"""The ceilings of the machine, measured in the same rounds as the candidates.

The ceilings are those of hal.profiling.ceilings: a matrix product of a size that suits the caches (oneDNN through
torch, with its output in reused memory), and a copy that exceeds all caches. Shares of the copy rate count the bytes
that an ideal kernel moves, which reads inputs once and writes outputs once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hal.profiling.ceilings import COPIED, SIZE, copy, product

from . import target
from .case import Thunk


@dataclass(frozen=True)
class Ceiling:
    """work: FLOP (of a product) or bytes (of a copy) of one call of what `make` returns."""

    make: Callable[[], Thunk]
    work: float


CEILINGS = {
    "GEMM f32": Ceiling(lambda: product(torch.float32, target.device()), 2.0 * SIZE**3),
    "GEMM bf16": Ceiling(lambda: product(torch.bfloat16, target.device()), 2.0 * SIZE**3),
    "copy": Ceiling(lambda: copy(target.device()), 2.0 * COPIED),  # every byte is read and written
}
