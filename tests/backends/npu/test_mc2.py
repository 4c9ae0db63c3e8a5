"""Ascend's operators that multiply and communicate: each of their limits, and training that reaches them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_runs import WIDE_OVERLAP, close, fused_counts, fused_steps
from torch import Tensor

import hal
from hal import ops
from hal.backends.npu import Npu
from hal.backends.npu.constraints import CONSTRAINTS
from hal.comm.threads import threads
from hal.testing.processes import run_processes

needs_torch_npu = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed")


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).npu()


def gather(x1: Tensor, x2: Tensor, comm: Any, ranks: int = 2, **options: Any) -> Any:
    return torch.ops.npu.npu_all_gather_base_mm(x1, x2, comm.hccl_name, ranks, **options)


def scatter(x1: Tensor, x2: Tensor, comm: Any, ranks: int = 2, **options: Any) -> Any:
    return torch.ops.npu.npu_mm_reduce_scatter_base(x1, x2, comm.hccl_name, ranks, **options)


Call = Callable[[Any], Any]
CALLS: dict[str, list[tuple[Call, Call]]] = {
    "mc2.summed_size": [
        (lambda c: gather(zeros(2, 256), zeros(256, 3), c), lambda c: gather(zeros(2, 255), zeros(255, 3), c)),
        (
            lambda c: scatter(zeros(2, 65534), zeros(65534, 1), c),
            lambda c: scatter(zeros(2, 65535), zeros(65535, 1), c),
        ),
    ],
    "mc2.dtypes": [
        (
            lambda c: gather(*[zeros(256, 256, dtype=torch.bfloat16)] * 2, c),
            lambda c: gather(*[zeros(256, 256, dtype=torch.float32)] * 2, c),
        ),
        (
            lambda c: scatter(zeros(2, 256), zeros(256, 3), c),
            lambda c: scatter(zeros(2, 256), zeros(256, 3, dtype=torch.bfloat16), c),
        ),
    ],
    "mc2.layout": [
        (lambda c: gather(zeros(2, 256), zeros(3, 256).t(), c), lambda c: gather(zeros(256, 2).t(), zeros(256, 3), c)),
        (
            lambda c: scatter(zeros(2, 256), zeros(3, 256).t(), c),
            lambda c: scatter(zeros(2, 256), zeros(256, 6)[:, ::2], c),
        ),
    ],
    "mc2.bias": [
        (
            lambda c: gather(zeros(2, 256), zeros(256, 3), c, gather_output=False),
            lambda c: gather(zeros(2, 256), zeros(256, 3), c, bias=zeros(3)),
        ),
        (
            lambda c: scatter(zeros(2, 256), zeros(256, 3), c),
            lambda c: scatter(zeros(2, 256), zeros(256, 3), c, bias=zeros(3)),
        ),
    ],
    "mc2.rows": [
        # torch_npu refuses it before the library does.
        (lambda c: scatter(zeros(4, 256), zeros(256, 3), c), lambda c: scatter(zeros(3, 256), zeros(256, 3), c)),
    ],
}  # fmt: skip
"""Constraint -> calls within and beyond it, on two ranks."""


def _limits() -> list[str]:
    """What is not as documented."""
    backend = hal.use("npu", simulate=True)
    comm, problems = backend.comm(timeout=60.0), []
    for id, pairs in CALLS.items():
        for accepted, refused in pairs:
            accepted(comm)
            try:
                refused(comm)
                problems.append(f"{id}: accepted a call beyond it")
            except RuntimeError as error:
                if f"error {CONSTRAINTS[id].code}" not in str(error) and id != "mc2.rows":
                    problems.append(f"{id}: {error}")
            hal.synchronize()  # nothing fails later
    return problems


def _domain_and_ranks() -> list[str]:
    """Four ranks: a group of three is too odd, and a second group is one too many."""
    backend = hal.use("npu", simulate=True)
    world = backend.comm(timeout=60.0)
    others = [r for r in range(world.size) if r != 3]
    x, weight = zeros(2, 256), zeros(3, 256)
    texts = []
    for ranks in ([0, 1], [2, 3], others):
        if world.rank not in ranks:
            continue
        comm: Any = backend.comm(ranks, timeout=60.0)
        texts.append("; ".join(hal.why(ops.all_gather_linear, x, weight, comm=comm).reasons["npu/mc2"]))
        ops.all_gather_linear(x, weight, comm=comm)  # the composition, where the operators refuse
        if texts[-1]:
            with pytest.raises(RuntimeError, match=r"world_size should be in|error 561002"):
                gather(x, weight.t(), comm, comm.size)
    hal.synchronize()
    return texts


@pytest.mark.slow
@needs_torch_npu
def test_a_call_within_and_one_beyond_each_limit() -> None:
    assert set(CALLS) | {"mc2.ranks", "mc2.domain"} == {c for c in CONSTRAINTS if c.startswith("mc2.")}
    assert run_processes(2, _limits, timeout=300.0) == [[]] * 2


@pytest.mark.slow
@needs_torch_npu
def test_a_second_group_and_three_ranks_run_the_composition() -> None:
    per_rank = run_processes(4, _domain_and_ranks, timeout=300.0)
    three = "3 ranks (MC2 on Atlas A2 takes 2, 4, 8); a second group (MC2 on Atlas A2 takes one in a process)"
    assert per_rank == [["", three], ["", three], ["", three], [""]]


@pytest.mark.slow
@needs_torch_npu
def test_training_runs_on_them() -> None:
    """Losses are those without the operators up to the order in which 16-bit partial sums are added."""
    options = {**WIDE_OVERLAP, "backend": "npu"}
    plain, none = run_processes(2, fused_steps, {**options, "tp_comm_overlap": False}, 3, timeout=300.0)[0]
    per_rank = run_processes(2, fused_steps, options, 3, timeout=300.0)
    assert not none and per_rank[0] == per_rank[1]
    losses, counts = per_rank[0]
    assert counts == fused_counts("npu/mc2", 3)
    close(losses, plain, 1e-3, 3e-2)


def test_other_communicators_are_refused_with_the_reason() -> None:
    x, weight = torch.zeros(2, 256, dtype=torch.float16, device="meta"), torch.zeros(3, 256, dtype=torch.float16)
    impl, *_ = Npu.impls["all_gather_linear"]
    call = ops.all_gather_linear.Call(x, weight.to("meta"), comm=threads(2)[0])
    assert impl.refusals(call) == ("a ThreadComm (the operators communicate over HCCL)",)
    alone = impl.refusals(ops.all_gather_linear.Call(x, weight.to("meta")))
    assert alone == ("one rank (there is nothing to communicate)",)
