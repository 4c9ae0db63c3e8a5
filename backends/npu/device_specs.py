"""Ascend 910 devices, for `hal plan`: peak of matrix products = cube cores x 16^3 multiply-adds x clock.

A device is what torch_npu counts: a chip of Atlas A2, and one of the two dies of a 910C (Atlas A3).
"""

from __future__ import annotations

import os

import hal

_CUBE = 2 * 16**3  # floating-point operations per core and cycle
_LINKS = "links assumed, not looked up: HCCS to 7 neighbours at 28 GB/s each way, 200 Gbit/s RoCE"


def hccl_buffers() -> float:
    """Bytes that a communicator of HCCL takes on a device: HCCL_BUFFSIZE MB (200 by default) to send and as many to
    receive, which nothing else can use (CANN's reference of environment variables, HCCL_BUFFSIZE). A value that is no
    number of MB counts as the default; HCCL itself refuses it."""
    text = os.environ.get("HCCL_BUFFSIZE", "")
    return 2.0 * 2**20 * (int(text) if text.isdecimal() and int(text) else 200)


_BUFFERS = hccl_buffers()
_HCCL = f"HCCL: {_BUFFERS / 2**20:g} MB a communicator (2 x HCCL_BUFFSIZE)"


def _atlas_a2(
    name: str, cores: int, hertz: float, source: str, memory: int = 64, bandwidth: float = 1.6e12
) -> hal.DeviceSpec:
    """memory in GiB. CANN has no float32 figure for the cube cores, and this table does not guess one."""
    peak = cores * _CUBE * hertz
    return hal.DeviceSpec(
        name,
        memory=memory * 2**30,
        flops={"bf16": peak, "fp16": peak},
        memory_bandwidth=bandwidth,
        node_link=7 * 28e9,
        network=25e9,
        per_node=8,
        source=f"{source}; {_LINKS}; {_HCCL}",
        communicator=_BUFFERS,
    )


_CONFIG = "cores and clock: CANN's platform_config; Atlas A2: 64 GB at 1.6 TB/s"

DEVICE_SPECS = (
    _atlas_a2("910b2", 24, 1.8e9, _CONFIG),
    _atlas_a2("910b3", 20, 1.8e9, _CONFIG),
    _atlas_a2(
        "910b1",
        24,
        1.85e9,
        "24 cube cores: pto-isa's tests of this chip; 1.85 GHz: its cost model of A2 and A3 (arch_config.hpp); "
        "Atlas A2: 64 GB at 1.6 TB/s",
    ),
    _atlas_a2(
        "910b4",
        20,
        1.65e9,
        "20 cores and 32 GB: HAMi's table of chips; 1.65 GHz: npu-smi of 910_9362, which HCCL maps to the same chip; "
        "0.8 TB/s assumed, half the memory at half the bandwidth of 910B3",
        memory=32,
        bandwidth=0.8e12,
    ),
    hal.DeviceSpec(
        "910c",
        memory=64 * 2**30,
        flops={"bf16": 376e12, "fp16": 376e12},
        memory_bandwidth=1.6e12,
        node_link=196e9,
        network=25e9,
        per_node=16,
        source="one of two dies, as published for CloudMatrix384 (arXiv 2506.12708): a chip has 752 TFLOP/s, 128 GB at "
        "3.2 TB/s, 392 GB/s each way of unified bus; 200 Gbit/s RoCE a die; 8 chips in a node"
        f"; {_HCCL}",
        communicator=_BUFFERS,
    ),
)
