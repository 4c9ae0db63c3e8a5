"""all_reduce between two processes of one machine: the backend's communicator against gloo.

HAL's all_reduce returns a new tensor and does not change its input. gloo's works in place, so the peer saves one copy.
The share of the copy rate of a large one counts the input and the result of every rank.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.distributed as dist

import hal

from ..harness import target
from ..harness.case import OURS, Candidate, Case, Thunk
from ..parallel.process_group import join

_SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "64 MB": 64 << 20}
_CACHED = 1 << 20
"""Up to this size, what is exchanged stays in caches."""
_RANKS = 2


@cache
def _communicator() -> hal.Comm:
    join()
    return hal.backend().comm(timeout=300.0)


def _ours(size: int) -> Thunk:
    comm = _communicator()
    x = torch.ones(size // 4, device=target.device())
    return lambda: comm.all_reduce(x)


def _gloo(size: int) -> Thunk:
    join()
    x = torch.zeros(size // 4)  # the sum is written to x itself; sums of zeros stay finite over any number of calls
    return lambda: dist.all_reduce(x)


def cases() -> list[Case]:
    """One case per size."""
    return [
        Case(
            "all_reduce",
            shape,
            {
                OURS: Candidate(partial(_ours, size), "hal-ranks", ranks=_RANKS),
                "gloo": Candidate(partial(_gloo, size), "gloo-ranks", ranks=_RANKS),
            },
            budgets={"budget of 3 us": 3e-6} if size == 1 << 10 else {},
            series=f"all_reduce, {_RANKS} processes: bytes",
            x=size,
            work=2.0 * _RANKS * size,
            ceiling="copy" if size > _CACHED else "",
        )
        for shape, size in _SIZES.items()
    ]
