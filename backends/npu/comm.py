"""Communication over HCCL, with its limitations: no average, no reduction of float64, bool or unsigned integers.

int64 is transferred and added as int64 (the 2023 adaptor of Megatron cast it to int32). The simulator has its own HCCL,
over shared memory between the processes of one machine, below torch_npu's unmodified process group.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hal
from hal import TorchComm, Transport, Work, torch_comm

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


# The dtypes and sizes of groups on torch_npu's pages on torch.distributed (Ascend/pytorch docs/zh/native_apis, of 2.7,
# 2.11 and 2.12). Bool is listed too, and sent as int32.
_LISTED = {torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32}
_DTYPES = {
    "all_gather": _LISTED,
    "reduce_scatter": _LISTED,
    "all_reduce": _LISTED - {torch.int8} | {torch.int64},
}
_SIZES_WITH_LISTS_ONLY = (3, 5, 6, 7)


class HcclComm(TorchComm):
    """A communicator that makes only those reductions and gathers that torch_npu documents for Atlas A2.

    HCCL's own reference accepts more dtypes and all sizes of groups. torch_npu's pages exclude int64 and int16 from
    gathers and reduce_scatter, and all_gather_into_tensor and reduce_scatter_tensor, but not the forms with lists, from
    groups of 3, 5, 6 and 7 ranks. The stricter document decides, as in constraints.csv.
    """

    @functools.cached_property
    def hccl_name(self) -> str:
        """The name of this group's HCCL communicator on this rank, by which operators that communicate are told it."""
        rank = dist.get_global_rank(self.group, self.rank)
        name: str = self.group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
        return name

    def _start(self, collective: str, x: Tensor, op: str, source: int) -> Work:
        dtype = x.dtype
        if not x.numel() or dtype == torch.bool or dtype in _DTYPES.get(collective, (dtype,)):
            return super()._start(collective, x, op, source)
        if collective == "all_gather":
            return super()._start(collective, x.contiguous().view(torch.int8), op, source).then(lambda y: y.view(dtype))
        if op == "avg":  # which starts the sum of this dtype
            return super()._start(collective, x, op, source)
        if dtype == torch.int64:
            return super()._start("all_reduce", x, op, source).then(self._my_chunk)
        # int8 and int16, whose sums wrap to the same values after a sum in int32.
        return super()._start(collective, x.to(torch.int32), op, source).then(lambda y: y.to(dtype))

    def _gather_into(self, out: Tensor, x: Tensor, arguments: dict[str, Any]) -> Any:
        if self.size not in _SIZES_WITH_LISTS_ONLY:
            return super()._gather_into(out, x, arguments)
        return dist.all_gather(list(out.chunk(self.size)), x, **arguments)

    def _scatter_into(self, out: Tensor, x: Tensor, op: Any, arguments: dict[str, Any]) -> Any:
        if self.size not in _SIZES_WITH_LISTS_ONLY:
            return super()._scatter_into(out, x, op, arguments)
        return dist.reduce_scatter(out, list(x.chunk(self.size)), op, **arguments)


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
    return torch_comm(HCCL, ranks, timeout=timeout, device=torch.device("npu", index), kind=HcclComm)
