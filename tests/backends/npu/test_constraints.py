"""Each line of constraints.csv: one call that the simulated library accepts and one that it refuses, at the call.

The calls go straight to torch_npu's operators. Nothing is read back after a refused call, so a refusal that came later,
at a synchronisation, would not be seen as one.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal import ops
from hal.backends.npu import Npu, simulator
from hal.backends.npu.constraints import CONSTRAINTS, TABLE
from hal.testing.processes import run_processes

Thunk = Callable[[], object]


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).npu()


def attention(
    b: int = 1,
    n: int = 1,
    sq: int = 4,
    sk: int = 4,
    d: int = 1,
    pse: tuple[int, ...] | None = None,
    sink: int | None = None,
    **options: Any,
) -> Thunk:
    def call() -> object:
        q, k = zeros(b, n, sq, d), zeros(b, n, sk, d)
        bias = None if pse is None else zeros(*pse)
        if sink is not None:
            options["sink"] = zeros(sink, dtype=single)
        return torch.ops.npu.npu_fusion_attention(q, k, k, n, "BNSD", pse=bias, **options)

    return call


def packed(
    ends: list[int], n: int = 1, pse: bool = False, mask: tuple[int, ...] | None = None, **options: Any
) -> Thunk:
    def call() -> object:
        x = zeros(max(ends), n, 1)
        bias = zeros(n, 4, 4) if pse else None
        options["atten_mask"] = None if mask is None else zeros(*mask, dtype=torch.bool)
        lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
        return torch.ops.npu.npu_fusion_attention(x, x, x, n, "TND", pse=bias, **lengths, **options)

    return call


def slopes(b: int, n: int, sq: int, sk: int, *shape: int) -> Thunk:
    def call() -> object:
        q, k, pse = zeros(b, n, sq, 8), zeros(b, n, sk, 8), zeros(*shape, dtype=single)
        return torch.ops.npu.npu_fusion_attention_v2(q, k, k, n, "BNSD", pse=pse, pse_type=2)

    return call


def value_size(d: int) -> Thunk:
    def call() -> object:
        q, v = zeros(1, 1, 4, 16), zeros(1, 1, 4, d)
        return torch.ops.npu.npu_fusion_attention(q, q, v, 1, "BNSD")

    return call


def gradient(*statistics: int, layout: str = "BNSD") -> Thunk:
    def call() -> object:
        q = zeros(2, 3, 4, 8) if layout == "BNSD" else zeros(4, 3, 8)
        rest = {} if layout == "BNSD" else {"actual_seq_qlen": [4], "actual_seq_kvlen": [4], "softmax_layout": "TND"}
        stats = zeros(*statistics, dtype=torch.float32)
        given = {"softmax_max": stats, "softmax_sum": stats, "attention_in": q}
        return torch.ops.npu.npu_fusion_attention_grad(q, q, q, q, 3, layout, **given, **rest)

    return call


def rotary(x: tuple[int, ...], cos: tuple[int, ...], mode: str = "half") -> Thunk:
    return lambda: torch.ops.npu.npu_rotary_mul(zeros(*x), zeros(*cos), zeros(*cos), mode)


def rms_norm(x: torch.dtype, gamma: torch.dtype) -> Thunk:
    return lambda: torch.ops.npu.npu_rms_norm(zeros(2, 8, dtype=x), zeros(8, dtype=gamma))


def prefix(b: int) -> Thunk:
    return lambda: attention(b, sparse_mode=6, atten_mask=zeros(3072, 2048, dtype=torch.bool), prefix=[4] * b)()


def packed_prefix(b: int) -> Thunk:
    return packed(list(range(1, b + 1)), mask=(3072, 2048), sparse_mode=6, prefix=[1] * b)


def router(k: int) -> Thunk:
    return lambda: torch.ops.npu.npu_moe_gating_top_k_softmax_v2(zeros(1, k), k=k)


def permute(*indices: int) -> Thunk:
    return lambda: torch.ops.npu.npu_moe_token_permute(zeros(indices[0], 1), zeros(*indices, dtype=torch.int32))


def grouped(groups: int, last: int = 1) -> Thunk:
    def call() -> object:
        ends = torch.tensor([0] * (groups - 1) + [1]).npu()
        options = {"split_item": 3, "group_type": 0, "group_list_type": 0}
        return torch.ops.npu.npu_grouped_matmul([zeros(1, 1)], [zeros(groups, 1, last)], group_list=ends, **options)

    return call


def ring(s: int, n: int, d: int, packed: bool = False) -> Thunk:
    def call() -> object:
        x = zeros(s, n, d) if packed else zeros(s, 2, n * d)
        stats = torch.ones((s, n, 8) if packed else (2, n, s, 8)).npu()
        how: dict[str, Any] = {}
        if packed:
            how = {"actual_seq_qlen": torch.tensor([0, s]).npu(), "input_layout": "TND", "input_softmax_layout": "TND"}
        return torch.ops.npu.npu_ring_attention_update(x, stats, stats, x, stats, stats, **how)

    return call


M = 1 << 20
half, bf16, single = torch.float16, torch.bfloat16, torch.float32
CALLS: dict[str, list[tuple[Thunk, Thunk]]] = {
    "attention.heads": [(attention(n=256), attention(n=257))],
    "attention.head_size": [(attention(d=768), attention(d=769))],
    "attention.value_size": [(value_size(16), value_size(17))],
    "attention.tokens": [
        (attention(sq=1, sk=64), attention(sq=1, sk=M + 16)),
        (attention(sq=1), attention(sq=M + 1, sk=1)),
    ],
    "attention.batch": [(attention(b=2, sq=1, sk=1), attention(b=2 * M + 1, sq=1, sk=1))],
    "attention.prefix_batch": [(prefix(32), prefix(33))],
    "attention.packed_sequences": [(packed(list(range(1, 1025))), packed(list(range(1, 1026))))],
    "attention.packed_prefix_batch": [(packed_prefix(3), packed_prefix(1025))],
    "attention.packed_tokens": [(packed([1, 4]), packed([1, M + 1]))],
    "attention.pse": [
        (attention(2, 3, 4, 6, pse=(2, 3, 4, 6)), attention(2, 3, 4, 6, pse=(2, 1, 4, 6))),
        (attention(2, 3, 4, 6, pse=(2, 3, 1, 6)), attention(2, 3, 4, 6, pse=(1, 3, 1, 6))),
        (attention(2, 3, 4, 6, pse=(1, 3, 4, 6)), attention(2, 3, 4, 6, pse=(3, 4, 6))),
    ],
    "attention.packed_pse_modes": [
        (packed([4], pse=True), packed([4], pse=True, mask=(2048, 2048), sparse_mode=7, pre_tockens=4, next_tockens=0)),
    ],
    "attention.slopes": [
        (slopes(2, 3, 4, 4, 3), slopes(2, 3, 4, 4, 2)),
        (slopes(2, 3, 4, 4, 2, 3), slopes(2, 3, 4, 4, 1, 3)),
    ],
    "attention.slopes_lengths": [(slopes(2, 3, 4, 4, 3), slopes(2, 3, 4, 6, 3))],
    "attention.sink": [(attention(n=3, sink=3), attention(n=3, sink=2))],
    "attention.statistics": [(gradient(2, 3, 4, 8), gradient(2, 3, 4, 1))],
    "attention.packed_statistics": [(gradient(4, 3, 8, layout="TND"), gradient(4, 3, 1, layout="TND"))],
    "ring.elements": [(ring(1, 3, 8), ring(0, 3, 8))],
    "ring.packed_heads": [(ring(2, 256, 64, True), ring(2, 257, 64, True))],
    "ring.packed_head_size": [
        (ring(2, 3, 768, True), ring(2, 3, 832, True)),
        (ring(2, 3, 128, True), ring(2, 3, 96, True)),
    ],
    "rotary.head_size": [(rotary((1, 2, 2, 894), (1, 2, 1, 894)), rotary((1, 2, 2, 896), (1, 2, 1, 896)))],
    "rotary.dimensions": [(rotary((2, 2, 4), (2, 1, 4)), rotary((1, 2, 2, 2, 4), (1, 2, 1, 1, 4)))],
    "rotary.half_batch": [(rotary((999, 2, 2, 64), (999, 2, 1, 64)), rotary((1000, 2, 1000, 2), (1000, 2, 1, 2)))],
    "rotary.half_heads": [(rotary((2, 999, 4), (2, 1, 4)), rotary((2, 1000, 4), (2, 1, 4)))],
    "rotary.interleaved_batch_heads": [
        (rotary((3, 2, 333, 4), (1, 2, 1, 4), "interleave"), rotary((4, 2, 250, 4), (1, 2, 1, 4), "interleave")),
    ],
    "rotary.half_angles": [
        (rotary((2, 3, 4, 8), (2, 3, 1, 8)), rotary((2, 3, 4, 8), (1, 3, 4, 8))),
        (rotary((2, 3, 4, 128), (2, 1, 4, 128)), rotary((2, 3, 8), (1, 3, 8))),
    ],
    "rotary.interleaved_angles": [
        (rotary((2, 3, 4, 8), (1, 3, 1, 8), "interleave"), rotary((2, 3, 4, 8), (2, 3, 1, 8), "interleave")),
        (rotary((2, 3, 4, 8), (2, 1, 1, 8), "interleave"), rotary((2, 3, 4, 8), (2, 3, 4, 8), "interleave")),
        (rotary((2, 3, 8), (2, 1, 8), "interleave"), rotary((2, 3, 8), (2, 3, 8), "interleave")),
    ],
    "rms_norm.gamma": [(rms_norm(half, single), rms_norm(single, half)), (rms_norm(bf16, bf16), rms_norm(bf16, half))],
    "moe.top_k": [(router(1024), router(1025))],
    "moe.per_token": [(permute(2, 512), permute(2, 513))],
    "moe.assignments": [(permute(2, 3), permute(16_777_215))],
    "grouped.groups": [(grouped(1024), grouped(1025))],
    "grouped.last_size": [(grouped(1, 65535), grouped(1, 65536))],
}  # fmt: skip
ELSEWHERE = {"hccl.reduced", "hccl.product", "softmax.size", "attention.packed_mask_rows", "ring.statistics"}
ELSEWHERE |= {id for id in CONSTRAINTS if id.startswith("mc2.")}  # test_mc2.py
"""Whose calls need processes of their own: other ranks, or because a refusal stops the device's queue."""
CASES = [(id, i, *pair) for id, pairs in CALLS.items() for i, pair in enumerate(pairs)]


def test_every_constraint_has_calls_and_a_source() -> None:
    assert set(CALLS) | ELSEWHERE == set(CONSTRAINTS)
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) - 1 == len(CONSTRAINTS)
    assert all(c.source and c.code for c in CONSTRAINTS.values())


@pytest.mark.parametrize("id, i, accepted, refused", CASES, ids=[f"{id}-{i}" for id, i, *_ in CASES])
def test_a_call_within_and_one_beyond_each_constraint(
    npu: Npu, machine: simulator.Simulator, id: str, i: int, accepted: Thunk, refused: Thunk
) -> None:
    machine.set("tile", 8192)  # calls at a limit of a million keys would have many tiles
    accepted()
    with pytest.raises(RuntimeError, match=f"error {CONSTRAINTS[id].code}|dim|shape"):
        refused()
    hal.synchronize()  # nothing fails later


def test_packed_lengths_may_end_with_zeros(npu: Npu) -> None:
    """Documented: sequences of 2, 3 and 4 tokens, and two that take no part, are [2, 5, 9, 0, 0]."""
    torch.manual_seed(0)
    x = torch.randn(9, 2, 8).npu()

    def call(ends: list[int]) -> Tensor:
        lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
        return torch.ops.npu.npu_fusion_attention(x, x, x, 2, "TND", **lengths)[0].cpu()

    assert torch.equal(call([2, 5, 9, 0, 0]), call([2, 5, 9]))


@pytest.mark.parametrize("layout", ["SBND", "BSND", "BNSD"])
def test_interleaved_angles_per_sample_are_rotated(npu: Npu, layout: str) -> None:
    """The operator takes no angles per sample when interleaved; the backend passes all tokens as one sequence."""
    torch.manual_seed(1)
    shape = {"SBND": (5, 3, 4, 8), "BSND": (3, 5, 4, 8), "BNSD": (3, 4, 5, 8)}[layout]
    x, cos, sin = torch.randn(shape), torch.randn(3, 5, 3), torch.randn(3, 5, 3)
    y = ops.rotary(x.npu(), cos.npu(), sin.npu(), layout=layout, interleaved=True)
    exact = ops.rotary.reference(x.double(), cos.double(), sin.double(), layout=layout, interleaved=True)
    assert torch.allclose(y.cpu().double(), exact, atol=1e-6)


STOPPED = """
import sys, torch, hal
hal.use("npu", simulate=True)
{call}
torch.npu.synchronize()
print("accepted", flush=True)
"""
SOFTMAX = "x = torch.ones(1, 1, 32, {size}).npu(); torch.ops.npu.npu_scaled_masked_softmax(x, x > 2, 1.0, False)"
PACKED = """
x, lengths = torch.ones(4, 1, 8).npu(), {{"actual_seq_qlen": [4], "actual_seq_kvlen": [4]}}
mask = torch.ones(4, 4).triu({diagonal}).bool().npu()
torch.ops.npu.npu_fusion_attention(x, x, x, 1, "TND", atten_mask=mask, sparse_mode=1, **lengths)
"""
RING = """
x, stats = torch.ones(4, 1, 8).npu(), torch.ones(1, 2, 4, 8).npu()
torch.ops.npu.npu_ring_attention_update(x, stats * {maximum}, stats, x, stats, stats)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "id, accepted, refused",
    [
        ("softmax.size", SOFTMAX.format(size=32), SOFTMAX.format(size=40)),
        ("softmax.size", SOFTMAX.format(size=4096), SOFTMAX.format(size=4128)),
        ("ring.statistics", RING.format(maximum=2), RING.format(maximum=-2)),
        # The first row of this triangle is all ones.
        ("attention.packed_mask_rows", PACKED.format(diagonal=1), PACKED.format(diagonal=0)),
    ],
)
def test_calls_that_the_queue_refuses(simulated: Npu, id: str, accepted: str, refused: str) -> None:
    """The older path of calls, and values, which are not known before: torch_npu's queue stops at the refused call."""
    for call, fine in ((accepted, True), (refused, False)):
        command = [sys.executable, "-c", STOPPED.format(call=call)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ("accepted" in done.stdout) == fine, done.stderr
        assert fine or f"error {CONSTRAINTS[id].code}" in done.stderr, done.stderr


def _reduced(names: list[str], op: str, scatter: bool) -> dict[str, bool]:
    import torch.distributed as dist

    comm = hal.use("npu", simulate=True).comm(timeout=60.0)
    reduction = getattr(dist.ReduceOp, op)
    result = {}
    for name in names:
        x = torch.full((4,), 2, dtype=getattr(torch, name), device=hal.device(comm.rank))
        try:
            if scatter:
                out = x.new_empty(2)
                dist.reduce_scatter_tensor(out, x, reduction)
            else:
                dist.all_reduce(out := x, reduction)
            result[name] = out.tolist() == [4] * len(out)
        except RuntimeError:
            result[name] = False
    return result


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed")
@pytest.mark.parametrize("scatter", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(
    "id, op, refused",
    [("hccl.reduced", "SUM", ["float64"]), ("hccl.product", "PRODUCT", ["int16", "bfloat16"])],
)
def test_reductions_over_hccl(id: str, op: str, refused: list[str], scatter: bool) -> None:
    accepted = CONSTRAINTS[id].value.split()
    # torch_npu's task queue can wait for ever after a refused call, because a task that is written while its consumer
    # ends stays in the queue (NPUQueue.cpp, Repository::ReadQueue, MakeSureQueueEmpty). Without it, calls refuse at
    # once.
    without_queue = {"ASCEND_LAUNCH_BLOCKING": "1"}
    # A refused call ends the communicator, so each has a job of its own.
    for names, works in ((accepted, True), *(([name], False) for name in refused)):
        results = run_processes(2, _reduced, names, op, scatter, environment=without_queue)
        assert results == [dict.fromkeys(names, works)] * 2
