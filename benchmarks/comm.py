"""all_reduce between two processes of one machine: the backend's communicator against gloo.

HAL's all_reduce returns a new tensor and leaves its input alone; gloo's works in place, so the peer does a copy less.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

import hal

from . import worker
from .case import OURS, Call, Candidate, Case

_SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "64 MB": 64 << 20}
_RANKS = 2


def _join() -> None:
    """Joins the ranks' process group, once per process. The ranks meet over a file."""
    if not dist.is_initialized():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ["HAL_BENCH_MEETING"], size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))


def _ours(size: int) -> Call:
    _join()
    comm = _communicator()
    x = torch.ones(size // 4, device=worker.device())
    return lambda: comm.all_reduce(x)


_comms: list[hal.Comm] = []


def _communicator() -> hal.Comm:
    if not _comms:
        _comms.append(hal.backend().comm(timeout=300.0))
    return _comms[0]


def _gloo(size: int) -> Call:
    _join()
    x = torch.zeros(size // 4)  # sums of zeros stay finite however often they are reduced
    return lambda: dist.all_reduce(x)


def cases() -> list[Case]:
    """One case per size."""
    return [
        Case(
            "all_reduce",
            shape,
            {
                OURS: Candidate(lambda s=size: _ours(s), "hal-ranks", ranks=_RANKS),
                "gloo": Candidate(lambda s=size: _gloo(s), "gloo-ranks", ranks=_RANKS),
            },
            budgets={"budget of 3 us": 3e-6} if size == 1 << 10 else {},
            series=f"all_reduce, {_RANKS} processes: bytes",
            x=size,
        )
        for shape, size in _SIZES.items()
    ]
