"""What kinds of device a backend can be planned for: the figures of a data sheet that bound a training step.

A backend lists those it knows in `Backend.accelerators`; `hal plan` reckons with them and touches no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Accelerator:
    """One kind of device, in a machine of `per_node` of them.

    memory: bytes. flops: peak of matrix products, dense, in FLOP/s, by "bf16", "fp16" and "fp32" (absent: not known).
    memory_bandwidth: bytes/s. node_link, network: bytes/s that one device can send to others of its machine, and to
    other machines. source: where the figures come from.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    memory_bandwidth: float
    node_link: float
    network: float
    per_node: int
    source: str = field(repr=False)
