"""Initialises torch.distributed with the transport of the active backend."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

import hal
from hal import HalError

from .device_proxy import DeviceProxy


def transport() -> str:
    """The torch.distributed backend for the active backend's device: gloo, hccl, ..."""
    device = hal.backend().device().type
    name = dist.Backend.default_device_backend_map.get(device)
    if name is None:
        raise HalError(f"torch.distributed has no transport for tensors on '{device}'; the backend must register one")
    return name


def join_world(**options: Any) -> None:
    """torch.distributed.init_process_group for the active backend, each process on its own device.

    options: of init_process_group, e.g. timeout. The default group is not bound to a device, since torch would then
    refuse the additional gloo groups that megatron-core creates.

    Raises HalError if the process was not started by a launcher (`hal launch`, torchrun).
    """
    if "RANK" not in os.environ and not options.keys() & {"rank", "store", "init_method"}:
        raise HalError("join_world: RANK is not set; start this with a launcher such as `hal launch`")
    DeviceProxy(hal.backend()).set_device(hal.backend().local_index())
    dist.init_process_group(transport(), **options)
