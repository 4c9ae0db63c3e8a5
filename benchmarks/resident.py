"""What training adds to a process's resident memory at its peak, and whether the peak creeps, step after step.

Asked of the backend that is measured, whose figures on a processor are the whole process's, so that plain torch's peers
are measured alike. A peak is measured in a process of its own: one that has grown before takes what it needs from that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

from hal.errors import HalError

from . import worker
from .case import Call


def _stats() -> Mapping[str, int]:
    stats = worker.backend().memory_stats()
    if not {"allocated", "peak"} <= stats.keys():
        raise HalError(f"the backend '{worker.backend().name}' does not say how much memory is in use here")
    return stats


def peak_of(make: Callable[[], Call], steps: int) -> Callable[[], float]:
    """A call that makes `steps` steps and returns how many bytes the peak lies above what was held before `make`."""
    gc.collect()
    worker.backend().reset_peak_memory()
    before, step = _stats()["allocated"], make()

    def call() -> float:
        for _ in range(steps):
            step()
        return float(_stats()["peak"] - before)

    return call


def peaks_after(step: Call, counts: Sequence[int]) -> list[int]:
    """The process's peak in bytes after so many steps (ascending) from now."""
    found, done = [], 0
    for count in counts:
        for _ in range(count - done):
            step()
        done = count
        found.append(_stats()["peak"])
    return found
