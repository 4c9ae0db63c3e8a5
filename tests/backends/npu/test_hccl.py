"""HCCL between processes: every collective against its reference; a rank that is late, absent or wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from absence import noticed, stay_away

import hal
from hal.backends.npu import simulator
from hal.testing.collectives import check_comm, parity_collectives
from hal.testing.processes import run_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed"),
]


def begin(timeout: float = 60.0) -> tuple[hal.Comm, torch.device, simulator.Simulator]:
    backend = hal.use("npu", simulate=True)
    comm = backend.comm(timeout=timeout)
    machine = simulator.running()
    assert machine is not None
    return comm, backend.device(int(os.environ["LOCAL_RANK"])), machine


def test_every_collective_means_what_its_definition_says() -> None:
    report = parity_collectives("npu", nproc=2, options={"simulate": True}, per_kind=2)
    assert report.ok, report.summary()
    declined = {(row.op.split("[")[0], row.dtype) for row in report.rows if row.status == "declined"}
    products = {(op, "float32") for op in ("all_gather_linear", "linear_reduce_scatter")}
    assert products < declined  # which MC2 does not take
    assert {dtype for _, dtype in declined - products} == {"float64", "uint8"}  # HCCL on Atlas A2 does not reduce them
    fused = {row.op for row in report.rows if "npu/mc2" in row.op and row.status == "pass"}
    assert fused == {"all_gather_linear[npu/mc2]", "linear_reduce_scatter[npu/mc2]"}
    assert all(row.simulated for row in report.rows)


LISTED = {"bfloat16", "float16", "float32", "int8", "int32"}
PAGES = {
    "all_gather": LISTED,
    "all_gather_into_tensor": LISTED,
    "reduce_scatter": LISTED,
    "reduce_scatter_tensor": LISTED,
    "all_reduce": {"bfloat16", "float16", "float32", "int32", "int64"},
}
"""What torch_npu's pages on torch.distributed list for Atlas A2, written down a second time."""


def _calls_of_the_kit() -> tuple[list[str], set[tuple[str, str]]]:
    """The kit's problems, and the (function, dtype) of what it called of torch.distributed."""
    import torch.distributed as dist

    from hal.comm import torch as transport

    calls: set[tuple[str, str]] = set()

    def spied(name: str, function: Any) -> Any:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            tensor = first[0] if isinstance(first, list) else first
            calls.add((name, str(tensor.dtype).removeprefix("torch.")))
            return function(first, *rest, **options)

        return call

    comm, device, _machine = begin()
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(dist, name, spied(name, getattr(dist, name)))
    for attribute, name in (("_all_gather", "all_gather_into_tensor"), ("_reduce_scatter", "reduce_scatter_tensor")):
        setattr(transport, attribute, spied(name, getattr(transport, attribute)))
    rows = check_comm(comm, device, per_kind=1)
    return [p for row in rows.values() for p in row["problems"]], calls


@pytest.mark.parametrize(
    "size", [2, 3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (5, 6, 7))], ids="{} ranks".format
)
def test_only_documented_collectives_are_called(size: int) -> None:
    """Every collective is right in groups of all sizes, of every dtype, and made of what torch_npu's pages list."""
    for problems, calls in run_processes(size, _calls_of_the_kit, timeout=600.0):
        assert not problems
        assert {(name, dtype) for name, dtype in calls if dtype not in PAGES[name]} == set()
        in_one_tensor = {name for name, _ in calls if name.endswith("_tensor")}
        assert bool(in_one_tensor) == (size == 2), in_one_tensor


def _absent(folder: str) -> Any:
    comm, device, _machine = begin(timeout=4.0)
    x = torch.ones(4, device=device)
    comm.all_reduce(x)
    if comm.rank == 1:
        stay_away(folder, 1)
        return None
    try:
        for _ in range(3):  # the host runs ahead: none of these waits for the absent rank
            x = comm.all_reduce(x)
        hal.synchronize()
    except hal.CollectiveTimeout as error:
        noticed(folder, comm.rank)
        with pytest.raises(hal.CollectiveTimeout):
            comm.all_reduce(x)
        return error.op, error.seq, error.absent
    return "nothing was raised"


def test_an_absent_rank_ends_in_a_timeout_that_names_it(tmp_path: Path) -> None:
    """All of three collectives are queued; the first one, which rank 1 did not start, is named."""
    assert run_processes(2, _absent, str(tmp_path), timeout=120.0, expect_exit=[1])[0] == ("all_reduce", 2, (1,))


def _queued() -> Any:
    comm, device, machine = begin()
    x = comm.all_reduce(torch.ones(4, device=device))
    hal.synchronize()
    if comm.rank == 1:
        machine.set("slow_rank_ms", 1000)
        machine.inject("slow_rank")
    before = machine.counters()
    y = comm.all_gather(comm.reduce_scatter(comm.all_reduce(x) * 2.0, "sum"))
    return machine.counters()["host_waits"] - before["host_waits"], y.tolist()


def test_collectives_are_queued_and_the_host_does_not_wait() -> None:
    """The host has queued three collectives and the work between them before the slow rank has joined the first."""
    for waits, values in run_processes(2, _queued):
        assert waits == 0 and values == [16.0] * 4


FAILING = """
import os, sys, time
import torch, hal
comm = hal.use('npu', simulate=True).comm(timeout=600.0)
x = torch.ones(4, device=hal.device(comm.rank))
comm.all_reduce(x)
print('together', flush=True)
if comm.rank == 1:
    raise RuntimeError('rank 1 gives up')
comm.all_reduce(x)
"""


def test_a_failing_rank_ends_the_job_although_its_peer_waits_for_it(tmp_path: Path) -> None:
    """The peer would wait ten minutes for the collective; the job ends long before and names the failed rank."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = [sys.executable, "-m", "hal", "launch", "--backend", "npu", "--simulate", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "rank 1 failed first" in done.stderr and "rank 1 gives up" in done.stderr
    assert "together" in done.stdout


def _uneven() -> Any:
    comm, device, _machine = begin()
    import torch_npu.distributed as vendor

    sizes = [5, 2]
    x = torch.arange(7.0, device=device) * (comm.rank + 1)
    scattered = torch.empty(sizes[comm.rank], device=device)
    vendor.reduce_scatter_tensor_uneven(scattered, x, sizes)
    gathered = torch.empty(7, device=device)
    vendor.all_gather_into_tensor_uneven(gathered, scattered, sizes)
    return scattered.tolist(), gathered.tolist()


def test_uneven_pieces() -> None:
    """torch_npu's own uneven collectives, which HAL does not need: HcclReduceScatterV and HcclAllGatherV."""
    total = [3.0 * i for i in range(7)]
    assert run_processes(2, _uneven) == [(total[:5], total), (total[5:], total)]


def _slow() -> Any:
    comm, device, machine = begin()
    if comm.rank == 1:
        machine.set("slow_rank_ms", 1500)
        machine.inject("slow_rank")
    started = time.monotonic()
    total = comm.all_reduce(torch.ones(3, device=device)).tolist()
    return total, time.monotonic() - started


def test_a_slow_rank_delays_and_harms_nobody() -> None:
    (total, _), (delayed, took) = run_processes(2, _slow)
    assert total == delayed == [2.0, 2.0, 2.0] and took >= 1.5


def _disagree() -> Any:
    comm, device, _machine = begin()
    try:
        comm.all_reduce(torch.ones(3 + comm.rank, device=device))
        hal.synchronize()
    except (RuntimeError, hal.HalError) as error:
        return f"{error} {error.__cause__}"
    return "nothing was raised"


def test_ranks_that_call_different_things_are_told() -> None:
    for message in run_processes(2, _disagree, timeout=120.0):
        assert "calls another collective" in message


def _injected() -> Any:
    comm, device, machine = begin(timeout=20.0)
    machine.inject("hccl_timeout")
    try:
        comm.all_reduce(torch.ones(3, device=device))
        hal.synchronize()
    except (RuntimeError, hal.HalError) as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def test_an_injected_timeout_looks_like_the_librarys() -> None:
    for name, message in run_processes(2, _injected, timeout=120.0):
        assert "507048" in message or name == "CollectiveTimeout", message
