"""all_gather_linear (npu_all_gather_base_mm) and linear_reduce_scatter (npu_mm_reduce_scatter_base), Ascend's MC2.

The operators name the group by its HCCL communicator. They take no bias but zeros, so it is added afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hal import Call, Comm, ops
from hal.backend_tools import ParallelLinear, parallel_linear_reasons

from .comm import HcclComm
from .constraints import CONSTRAINTS
from .device import Npu

ID = "npu/mc2"
_RANKS = [int(n) for n in CONSTRAINTS["mc2.ranks"].value.split()]
_DTYPES = CONSTRAINTS["mc2.dtypes"].value.split()
_SUMMED = CONSTRAINTS["mc2.summed_size"]
_domain: list[str] = []
"""The name of the process group whose ranks this process has called an operator with. Atlas A2 takes no other."""


def _why_not(call: Call, sums: Callable[[Call], Sequence[int]]) -> Sequence[str]:
    """sums: the numbers of products that the operators add for each element, in the backward pass, too."""
    reasons = list(parallel_linear_reasons(call))
    if reasons:
        return reasons
    comm, dtype = call.comm, str(call.x.dtype).removeprefix("torch.")
    if not isinstance(comm, HcclComm):
        return [f"a {type(comm).__name__} (the operators communicate over HCCL)"]
    if comm.size not in _RANKS:
        reasons.append(f"{comm.size} ranks (MC2 on Atlas A2 takes {', '.join(map(str, _RANKS))})")
    if not comm.on_one_machine():
        reasons.append("ranks of several machines (MC2 on Atlas A2 needs HCCS links between all of them)")
    if dtype not in _DTYPES:
        reasons.append(f"dtype {dtype} (MC2 takes {' and '.join(_DTYPES)})")
    reasons += [
        f"sums of {summed} products (MC2 takes {_SUMMED.least} to {_SUMMED.most})"
        for summed in dict.fromkeys(sums(call))
        if not _SUMMED.least <= summed <= _SUMMED.most
    ]
    if _domain and _domain[0] != comm.group.group_name:
        reasons.append("a second group (MC2 on Atlas A2 takes one in a process)")
    return reasons


def _why_not_gather(call: Call) -> Sequence[str]:
    return _why_not(call, lambda c: (c.weight.shape[1],))


def _why_not_scatter(call: Call) -> Sequence[str]:
    # The gradient of x sums over the other dimension of the weight, by the gathering operator.
    return _why_not(call, lambda c: (c.weight.shape[1], c.weight.shape[0]))


def _hccl_name(comm: Comm) -> str:
    """The name of the group's HCCL communicator. From now on, this is the group of MC2's operators in this process."""
    assert isinstance(comm, HcclComm)
    _domain[:] = [comm.group.group_name]
    return comm.hccl_name


def _gather(x: Tensor, weight: Tensor, comm: Comm, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """See hal.backend_tools.ParallelLinear."""
    name = _hccl_name(comm)
    y, rows = torch.ops.npu.npu_all_gather_base_mm(x, weight.t(), name, comm.size, gather_output=wanted)
    return y, rows if wanted else None


def _scatter(x: Tensor, weight: Tensor, comm: Comm) -> Tensor:
    """See hal.backend_tools.ParallelLinear."""
    y: Tensor = torch.ops.npu.npu_mm_reduce_scatter_base(x, weight.t(), _hccl_name(comm), comm.size)
    return y


_mc2 = ParallelLinear(_gather, _scatter)
Npu.impl(ops.all_gather_linear, id=ID, why_not=_why_not_gather, bwd=_mc2.all_gather_linear_gradients)(
    _mc2.all_gather_linear
)
Npu.impl(ops.linear_reduce_scatter, id=ID, why_not=_why_not_scatter, bwd=_mc2.linear_reduce_scatter_gradients)(
    _mc2.linear_reduce_scatter
)
