"""NCCL's capabilities, declared for HAL's communicators.

NCCL's Work.wait queues a wait on the current stream and returns. It blocks the process, and raises on timeout, only
with TORCH_NCCL_BLOCKING_WAIT=1 in the environment (WorkNCCL::wait in torch's ProcessGroupNCCL.cpp). HAL does not set
that, because work could then not be queued behind a wait. Without it, no CollectiveTimeout is raised: torch's watchdog
logs the collective and ends the process (TORCH_NCCL_ASYNC_ERROR_HANDLING), and the launcher ends the job.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import hal

_CARRIED = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
}


def _refuse(collective: str, dtype: torch.dtype, op: str | None) -> Sequence[str]:
    reasons = []
    if dtype not in _CARRIED:
        reasons.append(f"NCCL has no {dtype}")
    if op == "avg" and not dtype.is_floating_point:
        reasons.append("NCCL does not document that its average of integers rounds towards zero")
    return reasons


NCCL = hal.Transport(
    "nccl",
    carry={
        torch.bool: (torch.int32, "torch reduces bool as bytes over NCCL, which wrap at 256 ranks"),
        torch.int16: (torch.int32, "NCCL has no 16-bit integers"),
    },
    refuse=_refuse,
)
"""NCCL between GPUs. The barrier is a collective on the device, so a communicator belongs to one device."""


class NcclComm(hal.TorchComm):
    """A communicator over NCCL that knows whether its ranks can share memory.

    no_symmetric_memory: why torch's symmetric memory cannot be used between the ranks; "" if it can.
    """

    def __init__(self, group: dist.ProcessGroup, transport: hal.Transport, **how: Any) -> None:
        super().__init__(group, transport, **how)
        self.no_symmetric_memory = self._no_symmetric_memory()

    def _no_symmetric_memory(self) -> str:
        importlib.import_module("torch.distributed._symmetric_memory")  # defines torch.ops.symm_mem
        ops = torch.ops.symm_mem
        if not (hasattr(ops, "fused_all_gather_matmul") and hasattr(ops, "fused_matmul_reduce_scatter")):
            return "this torch has no fused_all_gather_matmul or fused_matmul_reduce_scatter (symm_mem)"
        if not self.on_one_machine():
            return "ranks of several machines (symmetric memory needs direct access between devices)"
        count, own = torch.cuda.device_count(), self.device.index
        if count < self.size:
            return f"this process sees {count} devices of the {self.size} ranks'"
        apart = [i for i in range(count) if i != own and not torch.cuda.can_device_access_peer(own, i)]
        return f"no direct access from device {own} to {', '.join(map(str, apart))}" if apart else ""
