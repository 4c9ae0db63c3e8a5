"""The simulated device: memory, streams, events, refusals and faults, seen through torch_npu."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hal import ops
from hal.backends.npu import Npu, simulator
from hal.backends.npu.simulator import generate
from hal.profiling import Recorder

BEGIN = """
import torch, hal
from hal.backends.npu import simulator
backend = hal.use('npu', simulate=True)
machine = simulator.running()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A separate process, because a failed stream cannot be used again."""
    return subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=300)


def test_tensors_travel_unchanged(npu: Npu) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8):
        x = (torch.arange(24).reshape(2, 3, 4) % 7).to(dtype)
        assert torch.equal(x.npu().cpu(), x)
        assert torch.equal(x.npu().transpose(0, 2)[1:].cpu(), x.transpose(0, 2)[1:])


@pytest.mark.parametrize("listed, count", [("0,2,5", 3), ("6", 1), ("1,9,2", 1), ("0,1,2,3,4,5,6,7", 8)])
def test_a_process_has_the_devices_that_are_listed(
    npu: Npu, listed: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CANN ignores the list from the first number on that is no device."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", listed)
    result = run("print('devices', torch.npu.device_count(), backend.probe().count)")
    assert f"devices {count} {count}\n" in result.stdout, result.stderr


def test_memory_is_counted_and_limited(npu: Npu, machine: simulator.Simulator) -> None:
    before = npu.memory_stats()["allocated"]
    block = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    assert npu.memory_stats()["allocated"] - before >= 1 << 20
    del block
    assert npu.memory_stats()["allocated"] == before
    machine.set("memory_bytes", 64 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(256 << 20, dtype=torch.uint8, device="npu")
    torch.empty(1 << 20, dtype=torch.uint8, device="npu")  # a smaller one still fits


def test_fresh_memory_is_nan(npu: Npu, machine: simulator.Simulator) -> None:
    torch.npu.empty_cache()  # type: ignore[attr-defined]
    fresh = torch.empty(40_000_011, device="npu")  # more than a cached segment with live tensors has left
    assert bool(fresh.cpu().isnan().all())


def test_an_injected_out_of_memory_ends_when_disarmed(npu: Npu, machine: simulator.Simulator) -> None:
    torch.npu.empty_cache()  # type: ignore[attr-defined]
    machine.inject("oom")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(31 << 20, device="npu")
    machine.inject("oom", 0)
    torch.empty(31 << 20, device="npu")


def test_streams_and_events_order_work(npu: Npu) -> None:
    x = torch.ones(1000, device="npu")
    with npu.stream():
        y = x * 2
    z = y + 1
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))  # type: ignore[attr-defined]
    start.record()
    w = z.square().sum()
    end.record()
    npu.synchronize()
    assert w.item() == 9000 and start.elapsed_time(end) >= 0


def test_profile_ranges_nest_and_close_after_an_error(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    mstx = torch.npu.mstx  # type: ignore[attr-defined]
    calls: list[object] = []
    monkeypatch.setattr(mstx, "range_start", lambda name: (calls.append(name), len(calls))[1])
    monkeypatch.setattr(mstx, "range_end", calls.append)
    with (
        torch.autograd.profiler.profile() as profiled,
        pytest.raises(ValueError, match="inside"),
        npu.profile_range("outer"),
        npu.profile_range("inner"),
    ):
        raise ValueError("inside")
    assert calls == ["outer", "inner", 2, 1]
    assert {"outer", "inner"} <= {event.key for event in profiled.key_averages()}
    monkeypatch.undo()
    with npu.profile_range("by torch_npu itself"):
        assert torch.ones(2, device="npu").sum().item() == 2


def test_generators_keep_and_restore_their_state(npu: Npu) -> None:
    torch.npu.manual_seed(7)  # type: ignore[attr-defined]
    state = torch.npu.get_rng_state()  # type: ignore[attr-defined]
    first = torch.rand(50, device="npu").cpu()
    torch.npu.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(50, device="npu").cpu(), first)
    assert not torch.equal(torch.rand(50, device="npu").cpu(), first)


@pytest.mark.parametrize("cores, expected", [(3, 3.0), (6, 0.0)])
def test_cores_add_their_partial_sums(npu: Npu, machine: simulator.Simulator, cores: int, expected: float) -> None:
    """In float32, 2^24 + 1 is 2^24: pairs add up to 2^24, 2 and 1 - 2^24, single summands to 0."""
    machine.set("cores", cores)
    x = torch.tensor([2.0**24, 1.0, 1.0, 1.0, 1.0, -(2.0**24)])
    assert x.npu().sum().item() == expected
    column = x[:, None].npu()
    assert column.sum(0).item() == expected and column.t().sum(1).item() == expected
    weight, bias = (torch.zeros(1).npu().requires_grad_() for _ in range(2))
    torch.nn.functional.layer_norm(torch.ones(6, 1).npu(), (1,), weight, bias).backward(column)
    assert bias.grad is not None and bias.grad.item() == expected


def test_sums_over_cores_keep_shapes_and_dtypes(npu: Npu) -> None:
    x = torch.randn(5, 4, 7)
    for dim in (0, 1, (0, 2), (-1, 0), None):
        for keep in (False, True):
            there = x.npu().sum(dim, keepdim=keep).cpu()
            assert torch.allclose(there, x.sum(dim, keepdim=keep), atol=1e-5) and there.shape == x.sum(dim, keep).shape
    assert torch.ones(5, dtype=torch.bool).npu().sum().item() == 5
    assert torch.zeros(0, 3).npu().sum(0).tolist() == [0.0, 0.0, 0.0]
    many = torch.ones(4099, dtype=torch.bfloat16).npu()
    assert many.sum().item() == 4096  # 4099 rounded once; partial sums rounded to 8 bits would lose more


@pytest.mark.parametrize("tile", [1, 5, 32, 128])
def test_attention_is_the_same_in_tiles_of_any_size(npu: Npu, machine: simulator.Simulator, tile: int) -> None:
    machine.set("tile", tile)
    q, k, v, dy = (torch.randn(1, 2, length, 8) for length in (37, 71, 71, 37))
    here = {"layout": "BNSD", "pre_tokens": 20, "next_tokens": -3}  # some rows see no key
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = ops.flash_attention.reference(*leaves, **here)
    expected.backward(dy)
    there = [x.npu().requires_grad_() for x in (q, k, v)]
    out = ops.flash_attention(*there, **here)
    out.backward(dy.npu())
    assert torch.allclose(out.cpu(), expected, atol=1e-5)
    for x, y in zip(there, leaves):
        assert x.grad is not None and y.grad is not None and torch.allclose(x.grad.cpu(), y.grad, atol=1e-5)


def test_matrix_products_of_float64_are_refused(npu: Npu) -> None:
    with pytest.raises(RuntimeError, match="161002"):
        (torch.ones(2, 2, dtype=torch.float64).npu() @ torch.ones(2, 2, dtype=torch.float64).npu()).cpu()


def test_torchs_gelu_is_the_tanh_form_whatever_is_asked(npu: Npu) -> None:
    x = torch.linspace(-3, 3, 200)
    got = torch.nn.functional.gelu(x.npu(), approximate="none").cpu()
    assert torch.allclose(got, torch.nn.functional.gelu(x, approximate="tanh"), atol=1e-6)


def test_an_operator_that_is_not_in_the_table_fails_by_name(simulated: Npu) -> None:
    done = run("torch.erfinv(torch.rand(3).npu()).cpu()")
    assert done.returncode != 0 and "operator Erfinv" in done.stderr and "operators.table" in done.stderr
    done = run("torch.cdist(torch.rand(3, 2).npu(), torch.rand(3, 2).npu()).cpu()")
    assert done.returncode != 0 and "Cdist" in done.stderr


def test_nothing_can_be_read_after_a_refused_operator(simulated: Npu) -> None:
    done = run(
        "x = torch.arange(4.).npu(); late = x + 1; torch.npu.synchronize()\n"
        "try: torch.erfinv(x).cpu(); print('erfinv was read')\n"
        "except RuntimeError as error: print('Erfinv' in str(error))\n"
        "reads = lambda: (x + 1).cpu(), late.cpu, lambda: (x * 2).tolist()\n"
        "def beside():\n"
        "    with torch.npu.stream(torch.npu.Stream()): return (x + 3).cpu()\n"
        "for read in (*reads, torch.npu.synchronize, backend.synchronize, beside):\n"
        "    try: print('read', read())\n"
        "    except RuntimeError as error: print('Erfinv' in str(error) or '100024' in str(error))\n"
    )
    assert done.stdout.splitlines()[-7:] == ["True"] * 7, done.stdout + done.stderr
    assert "stopped: [HAL simulator] operator Erfinv" in done.stderr


def test_a_stream_error_is_seen_at_synchronisation_and_stays(simulated: Npu) -> None:
    done = run(
        "x = torch.ones(3).npu(); torch.npu.synchronize(); machine.inject('stream'); y = x + 1\n"
        "for attempt in range(2):\n"
        "    try: torch.npu.synchronize(); print('nothing')\n"
        "    except RuntimeError as error: print('507015' in str(error), 'injected fault' in str(error))\n"
    )
    assert done.stdout.splitlines()[-2:] == ["True True", "True True"], done.stderr


def test_the_table_is_read_strictly() -> None:
    (op,) = generate.parse("Add(T self, T? other, S alpha, T[fh] out): out = at::add(self, other, alpha)")
    assert [a.kind for a in op.arguments] == ["T", "T", "S", "T"] and op.targets == ("out",)
    assert "aclnnAddGetWorkspaceSize" in op.source() and '"fh"' in op.source()
    (op,) = generate.parse("SwiGlu(T self, i dim, T out) if even(self, dim): out = at::silu(self)")
    assert op.targets == ("out",) and 'rules::even("aclnnSwiGlu", self, dim);' in op.source()
    with pytest.raises(ValueError, match="line 1"):
        generate.parse("Add(X self): self")
    with pytest.raises(ValueError, match="there already"):
        generate.parse("Neg(T x): x = -x\nNeg(T x): x = -x")
    assert len(generate.parse(generate.TABLE.read_text())) > 100


def test_a_recorder_waits_for_the_device_around_every_call(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    synchronize = npu.synchronize
    monkeypatch.setattr(npu, "synchronize", lambda: (waits.append(None), synchronize())[1])
    x = torch.randn(4, 8, device="npu").requires_grad_()
    with Recorder(npu) as recorder:
        before = len(waits)
        ops.rms_norm(x, torch.ones(8, device="npu")).sum().backward()
        assert len(waits) - before == 4
    rows = {row["direction"]: row for row in recorder.rows()}
    assert {row["implementation"] for row in rows.values()} == {npu.impls["rms_norm"][0].id}
    assert rows["forward"]["calls"] == rows["backward"]["calls"] == 1 and rows["backward"]["bytes"] > 0


def test_memory_is_reported_to_a_thread_that_has_used_no_device(npu: Npu) -> None:
    """A process that asks before its first tensor is in the same state."""
    with ThreadPoolExecutor(1) as pool:
        stats = pool.submit(npu.memory_stats).result()
    assert 0 < stats["free"] <= stats["total"]
