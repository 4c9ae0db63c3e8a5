"""The kit for collectives detects planted errors: a communicator with one error fails for that error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hal
from hal import Comm, ops
from hal.backends.cpu_ref import CpuRef
from hal.comm.contract import Work
from hal.comm.threads import ThreadComm, _Meeting, run_threads
from hal.testing.collectives import check_comm
from hal.testing.processes import run_processes
from hal.testing.sharded_processes import check_sharded_ops


class Liar(ThreadComm):
    """Correct except for one error."""

    mistake = ""

    def _start(self, collective, x, op, source):
        if self.mistake == "int64 through int32" and x.dtype == torch.int64:
            return super()._start(collective, x.int(), op, source).then(lambda y: y.long())
        if self.mistake == "int64 through float64" and x.dtype == torch.int64:
            return super()._start(collective, x.double(), op, source).then(lambda y: y.long())
        if self.mistake == "avg is sum" and op == "avg":
            op = "sum"
        if self.mistake == "all_to_all is all_gather's part" and collective == "all_to_all":
            return Work(lambda: x.clone())
        result = super()._start(collective, x, op, source).wait()
        if self.mistake == "mutates" and collective == "all_reduce":
            x.copy_(result)
        if self.mistake == "float64 result" and collective == "reduce_scatter":
            return Work(lambda: result.double())
        return Work(lambda: result)


INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
MISTAKES = {
    "int64 through int32": {"int64"},
    "int64 through float64": {"int64"},
    "avg is sum": {"float32", "bfloat16", "float16", "float64", *INTEGERS},
    "all_to_all is all_gather's part": {"float32", "bfloat16", "float16", "float64", *INTEGERS, "bool"},
    "mutates": {"float32", "bfloat16", "float16", "float64", *INTEGERS, "bool"},
    "float64 result": {"float32", "bfloat16", "float16", *INTEGERS, "bool"},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    meeting = _Meeting(2, 30.0)

    def run(comm):
        liar = Liar("liars", comm.rank, meeting)
        liar.mistake = mistake
        report = check_comm(liar, torch.device("cpu"), per_kind=6)
        return {dtype for (_, _, dtype), row in report.items() if row["problems"]}

    wrong_dtypes = run_threads(2, run)
    assert wrong_dtypes[0] | wrong_dtypes[1] == MISTAKES[mistake]


def _planted(wrong: str) -> list[str]:
    """The ops with whose fused product the kit finds problems if it orders the ranks' rows wrongly, or adds nothing."""

    class Planted(CpuRef):
        pass

    def gathered(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        comm: Comm | None = None,
        return_gathered: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert comm is not None
        rows = ops.mappings.all_gather_to_region(x, comm)
        y = torch.nn.functional.linear(rows.roll(x.shape[0], 0) if wrong == "order" else rows, weight, bias)
        return (y, rows.detach()) if return_gathered else y

    def scattered(x: Tensor, weight: Tensor, *, comm: Comm | None = None) -> Tensor:
        y = torch.nn.functional.linear(x, weight)
        assert comm is not None
        if wrong == "sum":
            return y.chunk(comm.size)[comm.rank].clone()
        return ops.mappings.reduce_scatter_from_region(y, comm)

    Planted.impl(ops.all_gather_linear, id="planted")(gathered)
    Planted.impl(ops.linear_reduce_scatter, id="planted")(scattered)
    hal.use("cpu_ref")
    with hal.activated(Planted()):
        rows = check_sharded_ops(CpuRef().comm(timeout=30.0), torch.device("cpu"))
    assert all(row["samples"] == 2 for row in rows.values())
    return sorted({op for (op, implementation, _), row in rows.items() if row["problems"]})


@pytest.mark.parametrize(
    "wrong, ops_with_problems", [("nothing", []), ("order", ["all_gather_linear"]), ("sum", ["linear_reduce_scatter"])]
)
def test_products_with_their_communication_are_checked(wrong: str, ops_with_problems: list[str]) -> None:
    assert run_processes(2, _planted, wrong) == [ops_with_problems] * 2
