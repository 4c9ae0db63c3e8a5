"""NCCL's capabilities, declared for HAL's communicators.

NCCL's Work.wait queues a wait on the current stream and returns. It blocks the process, and raises on timeout, only
with TORCH_NCCL_BLOCKING_WAIT=1 in the environment (WorkNCCL::wait in torch's ProcessGroupNCCL.cpp). HAL does not set
that, because work could then not be queued behind a wait. Without it, no CollectiveTimeout is raised: torch's watchdog
logs the collective and ends the process (TORCH_NCCL_ASYNC_ERROR_HANDLING), and the launcher ends the job.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
