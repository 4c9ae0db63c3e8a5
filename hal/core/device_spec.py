"""Data-sheet figures of a device model that bound the time and the memory of a training step.

A backend lists device models in `Backend.device_specs`; `hal plan` uses their figures and touches no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceSpec:
    """One device model, and the machine that contains `per_node` of these devices.

    memory: bytes. flops: peak of dense matrix products in FLOP/s, by "bf16", "fp16" and "fp32" (absent: not known).
    memory_bandwidth: bytes/s. node_link, network: bytes/s that one device can send to others of its machine, and to
    other machines. source: where the figures come from. communicator: bytes of memory that each communicator takes on a
    device, apart from tensors; 0 if that is not counted.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    memory_bandwidth: float
    node_link: float
    network: float
    per_node: int
    source: str = field(repr=False)
    communicator: float = 0.0
