"""Communication over HCCL, with its limitations: no average, no reduction of float64, bool or unsigned integers.

int64 is transferred and added as int64 (the 2023 adaptor of Megatron cast it to int32). The simulator has its own HCCL,
over shared memory between the processes of one machine, below torch_npu's unmodified process group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

import hal
from hal import Transport, torch_comm

_REDUCED = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)


def _refuse(collective: str, dtype: torch.dtype, op: str | None) -> Sequence[str]:
    if op is not None and dtype not in _REDUCED:
        return [f"{dtype} (HCCL on Atlas A2 reduces {', '.join(str(d).removeprefix('torch.') for d in _REDUCED)})"]
    if dtype.is_complex:
        return [f"{dtype} (HCCL has no complex numbers)"]
    return ()


HCCL = Transport(
    "hccl",
    emulate={"avg": "HcclReduceOp has sum, prod, max and min"},
    carry={torch.bool: (torch.int32, "HCCL does not reduce bool")},
    refuse=_refuse,
)


def make_comm(ranks: Sequence[int] | None, timeout: float, index: int) -> hal.Comm:
    """A communicator over the global `ranks` (None = all); this process uses device `index`."""
    # Without this setting, Work.wait returns immediately, and on a timeout a watchdog ends the process instead of
    # raising CollectiveTimeout.
    os.environ.setdefault("TORCH_HCCL_BLOCKING_WAIT", "1")
    torch.npu.set_device(index)  # type: ignore[attr-defined]
    return torch_comm(HCCL, ranks, timeout=timeout, device=torch.device("npu", index))
