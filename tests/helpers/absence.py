"""A rank that does not join a collective until it has timed out on the others, even on a busy machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import hal


def stay_away(folder: str, others: int) -> None:
    """Waits until `others` ranks have called `noticed`; run_processes ends the wait if they never do."""
    while sum(1 for _ in Path(folder).glob("noticed-*")) < others:
        time.sleep(0.02)


def noticed(folder: str, rank: int) -> None:
    Path(folder, f"noticed-{rank}").touch()


def timeout_without(comm: hal.Comm, absent: int, folder: str) -> object:
    """The attributes of the error of an all_gather that the rank `absent` does not join; None on that rank.

    (group, rank, op, seq, absent) of the CollectiveTimeout. The group must stay broken.
    """
    if comm.rank == absent:
        stay_away(folder, comm.size - 1)
        return None
    try:
        comm.all_gather(torch.ones(1))
    except hal.CollectiveTimeout as error:
        with pytest.raises(hal.CollectiveTimeout):
            comm.all_reduce(torch.ones(1))
        noticed(folder, comm.rank)
        return error.group, error.rank, error.op, error.seq, error.absent
    return "no timeout"
