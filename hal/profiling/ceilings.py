"""What the device can do, measured on it: the rate of a large matrix product per dtype, and of a large copy.

The product has a size that suits the caches, with its output in reused memory; the copy exceeds all caches. `hal bench`
measures the same two in the same rounds as its candidates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.backend import Backend

SIZE = 1536
"""Rows and columns of the product's matrices."""
COPIED = 128 << 20
"""Bytes that a copy reads; it writes as many."""


@dataclass(frozen=True)
class Ceilings:
    """copy: bytes read and written per second. products: FLOP/s by dtype, without the prefix "torch."."""

    copy: float
    products: dict[str, float] = field(default_factory=dict)


def product(dtype: torch.dtype, device: torch.device, size: int = SIZE) -> Callable[[], Any]:
    """A function that multiplies two matrices [size, size]."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    # torch.mm calls MKL for float32, which is slower than oneDNN on processors that are not Intel's.
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if a.device.type == "cpu" and dtype == torch.float32 and onednn is not None:
        return lambda: onednn(a, b, None, "none", [], "")
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def copy(device: torch.device, size: int = COPIED) -> Callable[[], Any]:
    """A function that copies `size` bytes."""
    a = torch.zeros(size // 4, device=device)
    b = torch.zeros_like(a)
    return lambda: b.copy_(a)


def measure(backend: Backend, device: torch.device, dtypes: Iterable[torch.dtype]) -> Ceilings | None:
    """The ceilings of a device, about half a second each; None on a simulator, whose rates say nothing of a device.

    Only dtypes of 16 and 32 bits are measured.
    """
    if backend.simulated:
        return None
    products = {
        str(dtype).removeprefix("torch."): 2.0 * SIZE**3 / _seconds(backend, product(dtype, device))
        for dtype in dtypes
        if dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    return Ceilings(2.0 * COPIED / _seconds(backend, copy(device)), products)


def _seconds(backend: Backend, run: Callable[[], Any]) -> float:
    """The shortest time of a call, among those of 0.3 seconds after a first one, at least three."""
    run()
    backend.synchronize()
    times: list[float] = []
    while len(times) < 3 or sum(times) < 0.3:
        began = time.perf_counter()
        run()
        backend.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
