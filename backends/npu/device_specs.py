"""Ascend 910B devices, for `hal plan`: peak of matrix products = cube cores x 16^3 multiply-adds x clock."""

from __future__ import annotations

import hal

_CUBE = 2 * 16**3  # floating-point operations per core and cycle


def _npu(name: str, cores: int, hertz: float) -> hal.DeviceSpec:
    peak = cores * _CUBE * hertz
    return hal.DeviceSpec(
        name,
        memory=64 * 2**30,
        # CANN has no float32 figure for the cube cores, and this table does not guess one.
        flops={"bf16": peak, "fp16": peak},
        memory_bandwidth=1.6e12,
        node_link=7 * 28e9,
        network=25e9,
        per_node=8,
        source="cores and clock: CANN's platform_config; Atlas A2: 64 GB at 1.6 TB/s; links assumed, not looked up: "
        "HCCS to 7 neighbours at 28 GB/s each way, 200 Gbit/s RoCE",
    )


DEVICE_SPECS = (_npu("910b2", 24, 1.8e9), _npu("910b3", 20, 1.8e9))
