"""The communicator over shared memory: the kit's cases, tensors of many chunks, and every way to lose a rank."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from absence import timeout_without
from torch import Tensor

import hal
from hal.backends.cpu_ref import comm as shared_memory
from hal.comm.contract import run_reference
from hal.testing.collectives import check_comm
from hal.testing.processes import run_processes

SLOT = 256 << 10
"""Bytes of a slot in kernels/shared_memory.c."""


def shared(timeout: float = 30.0, ranks: list[int] | None = None) -> hal.Comm:
    comm = hal.use("cpu_ref").comm(ranks, timeout=timeout)
    assert comm.shared
    return comm


def _kit() -> list[str]:
    return [p for row in check_comm(shared(), torch.device("cpu"), per_kind=3).values() for p in row["problems"]]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_agrees_with_the_meaning(size: int) -> None:
    assert run_processes(size, _kit) == [[]] * size


def _chunks() -> list[str]:
    """Sizes around that of a slot and of one rank's part of it. Values are whole numbers, so that sums are exact."""
    comm, wrong = shared(), []
    for dtype in (torch.int64, torch.uint8, torch.float32, torch.bfloat16):
        whole = SLOT // dtype.itemsize
        for n in (whole - 1, whole, whole + 1, whole // comm.size + 1, 2 * whole + 3):
            rows = n * comm.size
            xs = [torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(r)) for r in range(comm.size)]
            xs = [x.to(dtype) for x in xs]
            for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
                for op in ("sum", "max") if "reduce" in collective else ("sum",):
                    got = comm.start(collective, xs[comm.rank], op=op, source=1).wait()
                    want = run_reference(xs, collective, op=op, source=1)[comm.rank]
                    if not torch.equal(got, want):
                        wrong.append(f"{collective} {op} {dtype} {rows}")
    return wrong


def _large() -> list[str]:
    """Results above 12 MiB, which are written with streaming stores, and results at an address that does not allow
    them. At this size, both ways of writing slots are used."""
    comm, wrong, rows = shared(), [], (13 << 20) // 2 + 2
    for dtype in (torch.bfloat16, torch.int16):
        xs = [torch.randint(0, 50, (rows + 1,), generator=torch.Generator().manual_seed(r)).to(dtype) for r in (0, 1)]
        for first in (0, 1):
            mine = [x[first : first + rows] for x in xs]
            for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
                got = comm.start(collective, mine[comm.rank], source=1).wait()
                if not torch.equal(got, run_reference(mine, collective, source=1)[comm.rank]):
                    wrong.append(f"{collective} {dtype} from {first}")
    tiny = torch.full((64,), 1e-39, dtype=torch.bfloat16)
    if not torch.equal(comm.all_reduce(tiny, op="max"), tiny):
        wrong.append("max of subnormal numbers")
    return wrong


def test_large_results_and_tiny_numbers() -> None:
    assert run_processes(2, _large) == [[]] * 2


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_tensors_of_several_chunks(size: int) -> None:
    assert run_processes(size, _chunks) == [[]] * size


def _bits_and_nan() -> tuple[bytes, list[float], list[float]]:
    comm = shared()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
    holes = torch.tensor([1.0, float("nan"), 3.0]) if comm.rank else torch.tensor([float("nan"), 2.0, 4.0])
    total = comm.all_reduce(x)
    return total.numpy().tobytes(), comm.all_reduce(holes, "max").tolist(), comm.all_reduce(holes, "min").tolist()


def test_every_rank_has_the_same_bits_and_nan_wins() -> None:
    results = run_processes(3, _bits_and_nan)
    assert len({bits for bits, _, _ in results}) == 1
    for _, largest, smallest in results:
        assert str(largest[:2]) == str(smallest[:2]) == "[nan, nan]"
        assert (largest[2], smallest[2]) == (4.0, 3.0)


def _started_and_blocking() -> list[float]:
    comm = shared()
    comm.all_reduce(torch.ones(1))  # later calls of this kind take the fast path, unless collectives are pending
    pending = [comm.start("all_reduce", torch.full((SLOT,), float(i + comm.rank))) for i in range(20)]
    blocking = comm.all_reduce(torch.tensor([100.0 + comm.rank]))
    return [p.wait()[0].item() for p in reversed(pending)] + [blocking.item()]


def test_started_collectives_keep_their_order_with_blocking_ones() -> None:
    assert run_processes(2, _started_and_blocking) == [[2.0 * i + 1 for i in reversed(range(20))] + [201.0]] * 2


def _repeated() -> list[str]:
    """Calls that use the cached fast path of an earlier call, with tensors unlike those of the first."""
    comm, wrong = shared(), []
    x = torch.arange(24.0).reshape(4, 6)
    kinds: list[Tensor] = [x, x[0, 0], x[:0], x.t(), x[:, ::2], x[1:2].expand(3, 6), x.clone().requires_grad_(), -x]
    negative = torch._neg_view(x)  # its memory contains x
    for collective in ("all_reduce", "broadcast"):
        for source in (0, 1, 0):
            for n, like in enumerate(
                [*kinds, negative, *(k.bool() for k in kinds), torch.view_as_complex(x.view(4, 3, 2)).conj()]
            ):
                for op in ("sum", "max") if collective == "all_reduce" and not like.is_complex() else ("sum",):
                    xs = [(like * (1 + r)).to(like.dtype) if r else like for r in range(comm.size)]
                    got = comm._now(collective, xs[comm.rank], op, source)
                    want = run_reference([v.detach().resolve_neg() for v in xs], collective, op=op, source=source)[0]
                    if not torch.equal(got, want) or got.requires_grad:
                        wrong.append(f"{collective} {op} of tensor {n} from {source}: {got}, not {want}")
    return wrong


def test_kinds_of_calls_that_have_run_before() -> None:
    assert run_processes(2, _repeated) == [[]] * 2


def _refused() -> list[str]:
    comm, messages = shared(), []
    comm.all_reduce(torch.ones(2))
    for op in ("mean", ["sum"]):
        with pytest.raises(hal.ContractError) as error:
            comm.all_reduce(torch.ones(2), op)  # type: ignore[arg-type]
        messages.append(str(error.value))
    return [*messages, str(comm.all_reduce(torch.ones(1)).item())]


def test_an_unknown_reduction_is_refused_by_all_and_breaks_nothing() -> None:
    for messages in run_processes(2, _refused):
        assert "unknown reduction 'mean'" in messages[0] and "unknown reduction ['sum']" in messages[1]
        assert messages[2] == "2.0"


def _other_size() -> str:
    comm = shared()
    with pytest.raises(hal.ContractError) as error:
        comm.all_gather(torch.ones(4, dtype=torch.float32 if comm.rank else torch.complex64))
    return str(error.value)


def test_ranks_that_move_other_dtypes_are_told() -> None:
    assert all("other shape, dtype or reduction" in message for message in run_processes(2, _other_size))


def _sub_groups() -> float:
    world = shared()
    pair = shared(ranks=[0, 2] if world.rank % 2 == 0 else [1, 3])
    return pair.all_reduce(torch.tensor([float(world.rank)])).item() + world.all_reduce(torch.tensor([0.0])).item()


@pytest.mark.slow
def test_groups_have_segments_of_their_own() -> None:
    assert run_processes(4, _sub_groups) == [2.0, 4.0, 2.0, 4.0]


def _late(folder: str) -> object:
    shared().barrier()  # processes may need more than a second to start
    comm = shared(timeout=1.0)
    comm.barrier()
    return timeout_without(comm, 1, folder)


def test_a_rank_that_stays_away_is_named(tmp_path: Path) -> None:
    expected = [("world", 0, "all_gather", 2, (1,)), None, ("world", 2, "all_gather", 2, (1,))]
    assert run_processes(3, _late, str(tmp_path)) == expected


def _dies() -> str:
    comm = shared(timeout=300.0)
    comm.barrier()
    if comm.rank == 1:
        os._exit(7)
    with pytest.raises(hal.HalError) as error:
        comm.start("all_reduce", torch.ones(1 << 20)).wait()
    return str(error.value)


def test_a_rank_that_dies_is_named_at_once() -> None:
    message = run_processes(2, _dies, expect_exit=[1])[0]
    assert "all_reduce #2 on group 'world' failed on rank 0: the process of rank 1 has ended" in message


def _differ() -> str:
    comm = shared()
    with pytest.raises(hal.ContractError) as error:
        comm.all_reduce(torch.ones(4), "max" if comm.rank else "sum")
    return str(error.value)


def test_ranks_that_call_different_collectives_are_told() -> None:
    for message in run_processes(2, _differ):
        assert "runs another collective" in message


def _leaves_nothing() -> tuple[bool, list[str]]:
    before = set(os.listdir("/dev/shm"))
    comm = shared()
    comm.barrier()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "hal-comm" in line]
    return all("(deleted)" in line for line in maps) and bool(maps), sorted(set(os.listdir("/dev/shm")) - before)


def test_a_segment_has_no_name_to_leave_behind() -> None:
    assert run_processes(2, _leaves_nothing) == [(True, [])] * 2


def _elsewhere() -> tuple[bool, float]:
    if int(os.environ["RANK"]) == 1:
        shared_memory._machine = lambda: -5  # type: ignore[assignment]
    comm = hal.use("cpu_ref").comm(timeout=30)
    return comm.shared, comm.all_reduce(torch.ones(1)).item()


def _switched_off() -> tuple[bool, float]:
    comm = hal.use("cpu_ref", shared_memory=False).comm(timeout=30)
    return isinstance(comm, shared_memory.SharedMemoryComm), comm.all_reduce(torch.ones(1)).item()


def _what_kernels_lack() -> tuple[complex, list[complex]]:
    comm = shared()
    z = torch.tensor([1 + 2j]) * (comm.rank + 1)
    assert comm.why_not("all_reduce", z, "max") and not comm.why_not("all_reduce", z, "sum")
    assert dist.is_initialized()
    return comm.all_reduce(z).item(), comm.all_gather(z).tolist()


def test_gloo_takes_over_where_no_memory_is_shared() -> None:
    assert run_processes(2, _elsewhere) == [(False, 2.0)] * 2
    assert run_processes(2, _switched_off) == [(False, 2.0)] * 2
    assert run_processes(2, _what_kernels_lack) == [(3 + 6j, [1 + 2j, 2 + 4j])] * 2


def _refused_and_going_on(**options: bool) -> list[object]:
    comm = hal.use("cpu_ref", **options).comm(timeout=30)
    results: list[object] = []
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        with pytest.raises(hal.UnsupportedOp) as refusal:
            comm.all_reduce(torch.ones(4).to(dtype))
        results.append(str(refusal.value).partition("gloo has no ")[2].split()[0].strip(".;"))
        assert not comm.all_reduce(torch.empty(0, dtype=dtype)).numel()
    for op in ("sum", "avg"):
        results.append(comm.all_reduce(torch.tensor([30000, -3], dtype=torch.int16), op).tolist())
    for dtype in (torch.int8, torch.uint8, torch.complex32, torch.complex128):
        results.append(comm.all_reduce(torch.ones(1).to(dtype)).item())
    results.append(comm.all_reduce(torch.tensor([1 + 2j]), "avg").item())
    return results


def test_a_dtype_that_nobody_reduces_is_refused_and_the_group_goes_on() -> None:
    wrapped = [[-5536, -6], [-2768, -3]]  # 60000 wraps around in int16
    expected = ["torch.float8_e4m3fn", "torch.uint16", *wrapped, 2, 2, 2 + 0j, 2 + 0j, 1 + 2j]
    assert run_processes(2, _refused_and_going_on) == [expected] * 2
    assert run_processes(2, functools.partial(_refused_and_going_on, shared_memory=False)) == [expected] * 2


def _bytes_travel() -> list[float]:
    return shared().all_gather(torch.full((1,), 1.5).to(torch.float8_e4m3fn)).float().tolist()


def test_shared_memory_moves_any_dtype() -> None:
    assert run_processes(2, _bytes_travel) == [[1.5, 1.5]] * 2
