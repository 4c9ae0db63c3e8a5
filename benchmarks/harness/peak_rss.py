"""Measures the peak resident memory that training adds to a process, and its growth from step to step.

The figures are those of the measured backend. On the CPU these are the figures of the process, so plain torch's peers
are measured in the same way. Every peak is measured in a separate process, because a process that has grown before
would reuse memory that it already has.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

from hal.errors import HalError

from . import target
from .case import Thunk


def _stats() -> Mapping[str, int]:
    stats = target.backend().memory_stats()
    if not {"allocated", "peak"} <= stats.keys():
        raise HalError(f"the backend '{target.backend().name}' reports no memory statistics")
    return stats


def peak_of(make: Callable[[], Thunk], steps: int) -> Callable[[], float]:
    """A call that runs `steps` steps and returns the bytes by which the peak exceeds the usage before `make`."""
    gc.collect()
    target.backend().reset_peak_memory()
    before, step = _stats()["allocated"], make()

    def call() -> float:
        for _ in range(steps):
            step()
        return float(_stats()["peak"] - before)

    return call


def peaks_after(step: Thunk, counts: Sequence[int]) -> list[int]:
    """The process's peak in bytes after each of these numbers of steps (ascending), counted from now."""
    peaks, done = [], 0
    for count in counts:
        for _ in range(count - done):
            step()
        done = count
        peaks.append(_stats()["peak"])
    return peaks
