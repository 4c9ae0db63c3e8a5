"""The backend's communicators for megatron-core's process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import hal
from hal import Comm

_world: Any = None
_comms: dict[tuple[int, ...], Comm] = {}


def comm_of(group: Any) -> Comm | None:
    """The backend's communicator for the ranks of a process group, cached per world; None for a group of one rank."""
    global _world
    if group.size() == 1:
        return None
    if dist.group.WORLD is not _world:
        _world = dist.group.WORLD
        _comms.clear()
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in _comms:
        _comms[ranks] = hal.backend().comm(ranks)
    return _comms[ranks]
