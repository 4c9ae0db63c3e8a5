"""Comm: every transport agrees with the reference on a list of tensors; failures name the missing ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from absence import timeout_without
from hypothesis import given, settings
from hypothesis import strategies as st

import hal
from hal.comm.contract import Comm, Message, average, run_reference
from hal.comm.threads import run_threads
from hal.comm.torch import GLOO, Transport, torch_comm
from hal.spans import listening
from hal.testing.collectives import check_comm
from hal.testing.processes import run_processes

CPU = torch.device("cpu")


def problems(report: dict) -> list[str]:
    return [p for row in report.values() for p in row["problems"]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_threads_agree_with_the_meaning(size: int) -> None:
    for report in run_threads(size, lambda comm: check_comm(comm, CPU, per_kind=3)):
        assert problems(report) == []


def test_solo_agrees_with_the_meaning() -> None:
    assert problems(check_comm(hal.SingleRankComm(), CPU)) == []


def test_a_barrier_waits_for_the_device() -> None:
    """On a device with a queue, a collective may return before its result has been computed."""
    read: list[str] = []

    class Late(torch.Tensor):
        def item(self) -> float:
            read.append("item")
            return 0.0

    class Queued(hal.SingleRankComm):
        def _start(self, collective: str, x: torch.Tensor, op: str, source: int) -> hal.Work:
            return hal.Work(lambda: x.clone().as_subclass(Late))

    Queued().barrier()
    assert read == ["item"]


@given(size=st.integers(1, 4), rows=st.integers(1, 3), data=st.data())
@settings(max_examples=40)
def test_laws_between_collectives(size: int, rows: int, data: st.DataObject) -> None:
    """Properties that hold independently of the references' code: relations between the collectives."""
    values = st.lists(st.integers(-50, 50), min_size=rows * size, max_size=rows * size)
    xs = [torch.tensor(data.draw(values)) for _ in range(size)]
    assert all(torch.equal(x, xs[0]) for x in run_reference(xs, "broadcast")), "rank 0 sends by default"
    scattered = run_reference(xs, "reduce_scatter", op="sum")
    assert torch.equal(run_reference(scattered, "all_gather")[0], run_reference(xs, "all_reduce", op="sum")[0])
    once = run_reference(xs, "all_to_all")
    assert all(torch.equal(a, b) for a, b in zip(run_reference(once, "all_to_all"), xs))
    assert torch.equal(
        run_reference([-x for x in xs], "all_reduce", op="min")[0], -run_reference(xs, "all_reduce", op="max")[0]
    )
    assert torch.equal(torch.stack(xs).sum(0), run_reference(xs, "all_reduce", op="sum")[0])


@pytest.mark.parametrize("size, count", [(1, 0), (2, 5)])
def test_collectives_of_several_ranks_and_waits_for_them_are_spans(size: int, count: int) -> None:
    comm, heard, x = hal.SingleRankComm("pair"), [], torch.ones(3, requires_grad=True)
    comm.size = size
    with listening(heard.append):
        assert not comm.all_reduce(x).requires_grad
        assert not comm.start("all_gather", x).wait().requires_grad
        assert comm.exchange_start([Message(1, x)] if size > 1 else [], [])() == []
    parts = [(s.name, s.facts["part"]) for s in heard]
    expected = [("all_reduce", "blocking"), ("all_gather", "start"), ("all_gather", "wait")]
    assert parts == [*expected, ("exchange", "start"), ("exchange", "wait")][:count]
    assert all(s.kind == "communication" for s in heard)
    assert all((s.facts["group"], s.facts["ranks"], s.facts["bytes"]) == ("pair", 2, 12) for s in heard)


def test_work_is_finished_once_and_continued() -> None:
    finished: list[int] = []

    def finish() -> torch.Tensor:
        finished.append(1)
        return torch.ones(2)

    work = hal.Work(finish).then(lambda x: x + 1)
    assert work.wait() is work.wait() and work.wait().tolist() == [2.0, 2.0] and finished == [1]


def test_average_of_integers_rounds_towards_zero_exactly() -> None:
    assert average(torch.tensor([-7, 7, 2**60 + 3]), 2).tolist() == [-3, 3, 2**59 + 1]


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_reduce(torch.ones(2), "mean"),
        lambda c: c.reduce_scatter(torch.ones(3)),
        lambda c: c.all_to_all(torch.ones(())),
        lambda c: c.all_gather(torch.ones(())),
        lambda c: c.all_reduce(torch.tensor([True]), "avg"),
        lambda c: c.reduce_scatter(torch.tensor([True, False]), "avg"),
        lambda c: c.reduce_scatter(torch.ones(())),
        lambda c: c.broadcast(torch.ones(2), 2),
        lambda c: c.broadcast(torch.ones(2), -1),
        lambda c: c.start("gossip", torch.ones(2)),
        lambda c: c.exchange([Message(c.rank, torch.ones(1))]),
        lambda c: c.exchange([], [Message(c.rank, torch.ones(1))]),
        lambda c: c.exchange([Message(2, torch.ones(1))]),
        lambda c: c.exchange([], [Message(-1, torch.ones(1))]),
    ],
)
def test_wrong_arguments_are_refused_on_every_rank(call) -> None:
    def refused(comm: Comm) -> bool:
        with pytest.raises(hal.ContractError, match="group 'threads'"):
            call(comm)
        return True

    assert run_threads(2, refused) == [True, True]


def test_truth_values_are_gathered_and_reduced_by_extremes() -> None:
    x = torch.tensor([True, False])
    assert hal.SingleRankComm().all_gather(x).tolist() == x.tolist()
    assert (
        run_threads(2, lambda c: c.all_reduce(torch.tensor([c.rank == 1, False]), "max").tolist())
        == [[True, False]] * 2
    )
    assert run_threads(2, lambda c: c.start("all_gather", x, op="avg").wait().tolist()) == [x.tolist() * 2] * 2


def test_rank_0_broadcasts_by_default() -> None:
    assert run_threads(2, lambda c: c.broadcast(torch.tensor([c.rank])).tolist()) == [[0], [0]]


def test_a_transport_is_asked_for_its_reasons_with_the_reduction_of_those_that_reduce() -> None:
    asked: list[tuple[str, str | None]] = []

    class Refusing(hal.SingleRankComm):
        def why_not(self, collective: str, x: torch.Tensor, op: str | None = None) -> list[str]:
            asked.append((collective, op))
            return ["a test"] if collective == "all_gather" else []

    comm, x = Refusing(), torch.ones(2)
    for result in (comm.all_reduce(x, "max"), comm.reduce_scatter(x), comm.all_to_all(x)):
        assert torch.equal(result, x)
    with pytest.raises(hal.UnsupportedOp, match="all_gather on group 'single rank': a test"):
        comm.all_gather(x)
    assert asked == [("all_reduce", "max"), ("reduce_scatter", "sum"), ("all_to_all", None), ("all_gather", None)]
    assert list(hal.SingleRankComm().why_not("all_gather", x)) == []


def test_ranks_that_call_different_collectives_are_told() -> None:
    def differ(comm: Comm) -> torch.Tensor:
        return comm.all_reduce(torch.ones(2)) if comm.rank else comm.all_gather(torch.ones(2))

    with pytest.raises(hal.ContractError, match="different collectives"):
        run_threads(2, differ, timeout=5)


def test_a_thread_that_stays_away_is_named() -> None:
    def go(comm: Comm) -> object:
        if comm.rank == 1:
            return None
        with pytest.raises(hal.CollectiveTimeout) as error:
            comm.all_reduce(torch.ones(2))
        return error.value.absent

    assert run_threads(3, go, timeout=0.3)[0] == (1,)


def test_a_carrier_that_loses_values_is_refused() -> None:
    with pytest.raises(hal.HalError, match="cannot carry"):
        Transport("gloo", carry={torch.int64: (torch.int32, "as torch_npu did")})
    with pytest.raises(hal.HalError, match="no emulation"):
        Transport("gloo", emulate={"all_reduce": "?"})


def test_a_world_without_a_launcher_is_one_process() -> None:
    assert torch_comm(GLOO).size == 1
    with pytest.raises(hal.ContractError, match="launcher"):
        torch_comm(GLOO, [0, 1])


def test_a_group_on_devices_is_made_by_its_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subgroups of a world that is bound to devices would be split from it, and NCCL would wait for absent ranks."""
    init_kwargs: dict[str, dict] = {}

    class Stop(Exception):
        pass

    def new_group(*args: object, **kwargs: object) -> None:
        init_kwargs["group"] = kwargs
        raise Stop

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: init_kwargs.update(world=kwargs))
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    environment = {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**environment, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Stop):
        torch_comm(Transport("nccl"), [0, 1], device=torch.device("cuda", 1))
    assert "device_id" not in init_kwargs["world"]
    assert init_kwargs["group"]["device_id"] == torch.device("cuda", 1)
    assert init_kwargs["group"]["use_local_synchronization"]


POOR = Transport("gloo", emulate=dict.fromkeys(("avg", "reduce_scatter", "all_to_all"), "a test"), carry=GLOO.carry)


def _over_gloo() -> list[str]:
    return [p for t in (GLOO, POOR) for p in problems(check_comm(torch_comm(t, timeout=30), CPU, per_kind=3))]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_gloo_and_every_emulation_agree_with_the_meaning(size: int) -> None:
    assert run_processes(size, _over_gloo) == [[]] * size


def _groups() -> list[object]:
    world = torch_comm(GLOO, timeout=30)
    pair = torch_comm(GLOO, [0, 2] if world.rank % 2 == 0 else [1, 3], timeout=30)
    return [pair.rank, pair.size, pair.name, pair.all_reduce(torch.tensor([float(world.rank)])).item()]


def test_groups_of_some_ranks() -> None:
    r = run_processes(4, _groups)
    assert r == [[0, 2, "ranks 0,2", 2.0], [0, 2, "ranks 1,3", 4.0], [1, 2, "ranks 0,2", 2.0], [1, 2, "ranks 1,3", 4.0]]


def _one_stays_away(folder: str) -> object:
    comm = torch_comm(GLOO, timeout=2)
    comm.all_reduce(torch.ones(1))
    return timeout_without(comm, 2, folder)


@pytest.mark.slow
def test_a_rank_that_stops_answering_is_named(tmp_path: Path) -> None:
    r = run_processes(3, _one_stays_away, str(tmp_path))
    assert r[:2] == [("world", 0, "all_gather", 2, (2,)), ("world", 1, "all_gather", 2, (2,))]


def _one_dies() -> object:
    comm = torch_comm(GLOO, timeout=300)
    comm.all_reduce(torch.ones(1))
    if comm.rank == 1:
        time.sleep(1.2)  # the survivor's wait begins first, and its count is published
        os._exit(7)
    try:
        comm.all_reduce(torch.ones(1))
    except hal.HalError as error:
        return str(error)
    return "no error"


def test_a_rank_that_dies_is_named_at_once() -> None:
    message = run_processes(2, _one_dies, expect_exit=[1])[0]
    assert "all_reduce #2 on group 'world' failed on rank 0" in message and "did not arrive: 1" in message
