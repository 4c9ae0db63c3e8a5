"""What training adds to a process's resident memory at its peak, and whether the peak creeps from step to step.

The measured backend is asked for it. On a processor its figures are those of the whole process, so plain torch's peers
are measured alike. Every peak is measured in a process of its own: one that has grown before would take what it needs
from the memory that it already holds.
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
        raise HalError(f"the backend '{target.backend().name}' does not say how much memory is in use here")
    return stats


def peak_of(make: Callable[[], Thunk], steps: int) -> Callable[[], float]:
    """A call that makes `steps` steps and returns how far, in bytes, the peak is above the use before `make`."""
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
