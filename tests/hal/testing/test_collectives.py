"""The kit for collectives detects planted errors: a communicator with one error fails for that error."""

from __future__ import annotations

import pytest
import torch

from hal.comm.contract import Work
from hal.comm.threads import ThreadComm, _Meeting, run_threads
from hal.testing.collectives import check_comm


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
