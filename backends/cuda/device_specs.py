"""NVIDIA data-centre GPUs, for `hal plan`: peaks without sparsity, link bandwidths in one direction, memory as the
driver reports it."""

from __future__ import annotations

import hal

_MIB, _T, _G = 2**20, 1e12, 1e9


def _gpu(
    name: str, mib: int, bf16: float, fp32: float, memory: float, nvlink: float, network: float, source: str
) -> hal.DeviceSpec:
    flops = {"bf16": bf16 * _T, "fp16": bf16 * _T, "fp32": fp32 * _T}
    return hal.DeviceSpec(name, mib * _MIB, flops, memory * _G, nvlink * _G, network * _G, 8, source)


DEVICE_SPECS = (
    _gpu(
        "h100", 81559, 989.4, 66.9, 3350, 450, 50, "NVIDIA H100 Tensor Core GPU data sheet (SXM5); DGX H100: 400 Gbit/s"
    ),
    _gpu(
        "h200",
        143771,
        989.4,
        66.9,
        4800,
        450,
        50,
        "NVIDIA H200 Tensor Core GPU data sheet (SXM5); DGX H200: 400 Gbit/s",
    ),
    _gpu("a100", 81920, 312, 19.5, 2039, 300, 25, "NVIDIA A100 data sheet (80 GB SXM4); DGX A100: 200 Gbit/s"),
    _gpu("a100-40gb", 40960, 312, 19.5, 1555, 300, 25, "NVIDIA A100 data sheet (40 GB SXM4); DGX A100: 200 Gbit/s"),
)
