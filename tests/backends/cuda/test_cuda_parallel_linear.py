"""Products with their communication on cuda: torch's fused ops on symmetric memory, by the simulator's stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_runs import WIDE_OVERLAP, close, fused_counts, fused_steps

import hal
from hal import ops
from hal.backends.cuda import Cuda
from hal.backends.cuda.comm import NcclComm
from hal.backends.cuda.simulator import symmetric_memory
from hal.comm.threads import threads
from hal.testing.processes import run_processes
from hal.testing.sharded_processes import check_sharded_ops

ID = "cuda/symm_mem"


def _checked() -> dict[tuple[str, str, str], dict[str, Any]]:
    backend = hal.use("cuda", simulate=True)
    return check_sharded_ops(backend.comm(timeout=60.0), backend.device())


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_they_compute_what_the_reference_does(ranks: int) -> None:
    for rows in run_processes(ranks, _checked):
        fused = {key: row for key, row in rows.items() if key[1] == ID}
        assert {key[0] for key in fused} == {"all_gather_linear", "linear_reduce_scatter"} and len(fused) == 6
        assert all(row["samples"] == 2 and not row["problems"] for row in rows.values()), rows


@pytest.mark.slow
def test_training_runs_on_them() -> None:
    options = {**WIDE_OVERLAP, "backend": "cuda"}
    plain, none = run_processes(2, fused_steps, {**options, "tp_comm_overlap": False}, 3, timeout=300.0)[0]
    per_rank = run_processes(2, fused_steps, options, 3, timeout=300.0)
    assert not none and per_rank[0] == per_rank[1]
    losses, counts = per_rank[0]
    assert counts == fused_counts(ID, 3)
    close(losses, plain, 1e-3, 3e-2)


def _refusals(comm: hal.Comm | None, dtype: torch.dtype = torch.bfloat16) -> tuple[str, ...]:
    impl = next(i for i in Cuda.impls["all_gather_linear"] if i.id == ID)
    x, weight = (torch.zeros(shape, dtype=dtype, device="meta") for shape in ((2, 8), (3, 8)))
    return impl.refusals(ops.all_gather_linear.Call(x, weight, comm=comm))


def test_why_it_is_not_used() -> None:
    hal.use("cuda", simulate=True)
    group = "symmetric memory belongs to a group of processes with a device each"
    assert _refusals(None) == ("one rank (there is nothing to communicate)",)
    assert _refusals(threads(2)[0]) == (f"a ThreadComm ({group})",)
    assert "dtype torch.float64" in _refusals(threads(2)[0], torch.float64)[0]


@pytest.mark.parametrize(
    "machines, devices, peers, reason",
    [
        (1, 2, True, ""),
        (2, 2, True, "ranks of several machines (symmetric memory needs direct access between devices)"),
        (1, 1, True, "this process sees 1 devices of the 2 ranks'"),
        (1, 2, False, "no direct access from device 0 to 1"),
    ],
)
def test_what_devices_need(
    machines: int, devices: int, peers: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hal.use("cuda", simulate=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)
    comm = object.__new__(NcclComm)
    comm.size, comm.device = 2, torch.device("cuda", 0)
    monkeypatch.setattr(NcclComm, "on_one_machine", lambda self: machines == 1)
    comm.no_symmetric_memory = comm._no_symmetric_memory()
    assert comm.no_symmetric_memory == reason
    assert _refusals(comm) == ((reason,) if reason else ())


def _illegal() -> list[str]:
    """The errors of calls that torch's ops refuse."""
    hal.use("cuda", simulate=True).comm(timeout=60.0)
    symmetric_memory.register()
    name = torch.distributed.distributed_c10d._get_default_group().group_name
    x, weight, fused = torch.zeros(4, 8), torch.zeros(8, 3), torch.ops.symm_mem
    errors = []
    for call in (
        lambda: fused.fused_all_gather_matmul(x[0], [weight], 0, name),
        lambda: fused.fused_all_gather_matmul(x, [weight[None]], 0, name),
        lambda: fused.fused_all_gather_matmul(x, [weight], 2, name),
        lambda: fused.fused_all_gather_matmul(x, [weight.to(torch.bfloat16)], 0, name),
        lambda: fused.fused_matmul_reduce_scatter(x, weight, "max", 0, name),
        lambda: fused.fused_matmul_reduce_scatter(x[:3], weight, "sum", 0, name),
    ):
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        errors.append(str(error.value))
    return errors


def test_the_stand_ins_refuse_what_torchs_ops_do() -> None:
    parts = ["A must be a matrix", "B must be a matrix", "dimension 2", "dtype", "reduce_op", "2 ranks do not divide"]
    errors = run_processes(2, _illegal)[0]
    assert len(errors) == len(parts) and all(part in error for part, error in zip(parts, errors)), errors
