"""all_gather_linear and linear_reduce_scatter by torch's symmetric memory, in which each device reads its peers' rows.

`symm_mem.fused_all_gather_matmul` multiplies the rows of one rank while those of the next are copied, and
`fused_matmul_reduce_scatter` copies the products of one rank's rows while it multiplies the next's. torch allocates the
memory that the ranks share when the first call of a group needs it, which all its ranks make.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hal
from hal import Call, Comm, ops
from hal.backend_tools import ParallelLinear, parallel_linear_reasons

from . import launch
from .comm import NcclComm
from .device import Cuda
from .simulator import symmetric_memory
from .tensors import reasons

ID = "cuda/symm_mem"


def _why_not(call: Call) -> Sequence[str]:
    comm = call.comm
    refused = list(parallel_linear_reasons(call)) or list(reasons(call.x, call.weight))
    if refused:
        return refused
    if isinstance(comm, NcclComm):
        return [comm.no_symmetric_memory] if comm.no_symmetric_memory else []
    # On the simulator, a group of processes over gloo takes the place of one over NCCL.
    if launch.simulated() and isinstance(comm, hal.TorchComm):
        return [] if comm.on_one_machine() else ["ranks of several machines"]
    return [f"a {type(comm).__name__} (symmetric memory belongs to a group of processes with a device each)"]


def _name(comm: Comm) -> str:
    """The name by which torch's ops find the process group. On the simulator, defines the stand-ins of these ops."""
    assert isinstance(comm, hal.TorchComm)
    if launch.simulated():
        symmetric_memory.register()
    name: str = comm.group.group_name
    return name


def _gather(x: Tensor, weight: Tensor, comm: Comm, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """See hal.backend_tools.ParallelLinear."""
    name = _name(comm)
    rows, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, name, return_A=wanted)
    return y, rows


def _scatter(x: Tensor, weight: Tensor, comm: Comm) -> Tensor:
    """See hal.backend_tools.ParallelLinear."""
    name = _name(comm)
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, name)
    return y


_fused = ParallelLinear(_gather, _scatter)
Cuda.impl(ops.all_gather_linear, id=ID, why_not=_why_not, bwd=_fused.all_gather_linear_gradients)(
    _fused.all_gather_linear
)
Cuda.impl(ops.linear_reduce_scatter, id=ID, why_not=_why_not, bwd=_fused.linear_reduce_scatter_gradients)(
    _fused.linear_reduce_scatter
)
