"""Communication over HCCL, with its limitations: no average, no reduction of float64, bool or unsigned integers.

int64 is transferred and added as int64 (the 2023 adaptor of Megatron cast it to int32). The simulator has its own HCCL,
over shared memory between the processes of one machine, below torch_npu's unmodified process group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

import hal
from hal import Transport, torch_comm

from .constraints import CONSTRAINTS

_REDUCED = CONSTRAINTS["hccl.reduced"].value.split()


def _refuse(collective: str, dtype: torch.dtype, op: str | None) -> Sequence[str]:
    if op is not None and str(dtype).removeprefix("torch.") not in _REDUCED:
        return [f"{dtype} (HCCL on Atlas A2 reduces {', '.join(_REDUCED)})"]
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
    """A communicator over the global `ranks` (None = all); this process uses device `index`.

    Work.wait orders later work of the stream after the collective and returns, so the host runs ahead. A collective
    whose peers do not come is ended by HCCL after `timeout` seconds, and the error surfaces where the host next waits
    for the device; `collective_failure` then names the ranks. Variables that are set already are kept. The first
    communicator of the process decides, because HCCL reads its limits once.
    """
    # torch_npu wants HCCL's limit below the group's, and a stream's wait for another stream's event above it.
    execute = max(1, math.ceil(timeout) - 1)
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(execute))
    os.environ.setdefault("HCCL_EVENT_TIMEOUT", str(int(os.environ["HCCL_EXEC_TIMEOUT"]) + 3))
    # With 1, the default, torch_npu's own watchdog ends the process as soon as HCCL reports an error, before HAL can
    # say which rank is missing.
    os.environ.setdefault("TORCH_HCCL_ASYNC_ERROR_HANDLING", "0")
    torch.npu.set_device(index)  # type: ignore[attr-defined]
    return torch_comm(HCCL, ranks, timeout=timeout, device=torch.device("npu", index))
