"""Joining the world that a launcher described, over what the active backend talks through."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

import hal
from hal import HalError

from .place import Place


def transport() -> str:
    """torch.distributed's name for what the active backend's device talks through: gloo, hccl, ..."""
    device = hal.backend().device().type
    found = dist.Backend.default_device_backend_map.get(device)
    if found is None:
        raise HalError(f"torch.distributed knows no transport for tensors on '{device}'; the backend must register one")
    return found


def join_world(**options: Any) -> None:
    """torch.distributed.init_process_group for the active backend, each process on its own device.

    options: of init_process_group, e.g. timeout. The default group is not bound to a device: megatron-core makes gloo
    groups beside it, which torch then refuses.

    Raises HalError where no launcher (`hal launch`, torchrun) has described a world.
    """
    if "RANK" not in os.environ and not options.keys() & {"rank", "store", "init_method"}:
        raise HalError("join_world: no launcher has described a world (RANK is not set); run this with `hal launch`")
    Place(hal.backend()).set_device(hal.backend().local_index())
    dist.init_process_group(transport(), **options)
