"""`make gpu` cannot run here; what can be checked is that its calls are valid, and what its report says of numbers."""

from __future__ import annotations

import contextlib
import json
import types

import pytest
import torch

import hal
from hal.backends.cuda import Cuda, launch
from hal.bench import gpu, gpu_cases, gpu_checks


def test_without_a_gpu_it_says_so_and_returns_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu.main([]) == 2
    assert "built without CUDA" in capsys.readouterr().err


def row(**changes):
    plain = {"name": "layer_norm fwd", "shape": "8x8", "peer": "eager", "ratio_median": 1.5, "ratio_min": 1.4}
    plain |= {"ratio_max": 1.6, "seconds": 1e-5, "ceiling": "device copy", "share_of_ceiling": 0.9}
    return {**plain, **changes}


def test_what_misses_a_goal_is_marked():
    assert gpu.missed(row()) == ""
    assert "goal 85%" in gpu.missed(row(share_of_ceiling=0.5))
    attention = {"name": "attention causal fwd", "share_of_ceiling": None}
    assert "faster" in gpu.missed(row(**attention, peer="SDPA cuDNN", ratio_median=0.9))
    assert gpu.missed(row(**attention, peer="SDPA cuDNN", ratio_median=1.0)) == ""


def test_the_order_of_attention_is_read_from_the_rows():
    name = "attention causal fwd"
    rows = [row(name=name, peer=p, ratio_median=r) for p, r in (("cuda/sdpa", 1.9), ("cuda/flash", 1.0))]
    rows.append({"name": name, "shape": "", "peer": "cuda/flex", "absent": "no Triton"})
    assert gpu.attention_order(rows) == ["cuda/flash", "cuda/sdpa"]


def test_the_report_holds_every_row():
    parity = {"op": "rotary", "dtype": "float32", "implementation": "cuda/kernel", "status": "pass", "samples": 3}
    result = {
        "machine": {"device": "NVIDIA Test"},
        "parity": [{**parity, "worst_error_in_tolerances": 0.123456}],
        "benchmarks": [row(), {"name": "x", "shape": "y", "peer": "compile", "absent": "no Triton"}],
        "training": {"command": "c", "losses": {"cuda": [1.0]}, "worst_difference": 0.001, "tolerance": 0.05},
    }
    result["device"] = {"graph of rotary cuda/kernel": "", "memory statistics": "64 MiB show as 0"}
    text = gpu.markdown(result)
    assert "- graph of rotary cuda/kernel: holds" in text and "**memory statistics: 64 MiB show as 0**" in text
    assert "| rotary | float32 | cuda/kernel | pass | 3 | 0.123 |" in text
    assert "| 1.50 | 1.40..1.60 | 10.0 us | 90% |" in text and "no Triton" in text and "0.0010" in text


def test_an_unfinished_report_says_what_is_missing():
    result = {"machine": {"device": "NVIDIA Test"}, "errors": {"training": "OSError: no"}, "parity": [], "device": {}}
    assert gpu.failures(result) == ["training did not run: OSError: no", "benchmarks has not run"]
    text = gpu.markdown(result)
    assert "**training did not run: OSError: no**" in text and "nothing ran" in text


def test_a_part_that_breaks_does_not_end_the_others(monkeypatch, tmp_path, capsys):
    def broken(*args):
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    def half(result):
        result["benchmarks"] = [row()]
        broken()

    monkeypatch.setattr(gpu, "VERIFIED", tmp_path)
    monkeypatch.setattr(hal, "use", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test 1")
    for name, part in (("parity", broken), ("checks", dict), ("train", broken), ("benchmarks", half)):
        monkeypatch.setattr(gpu, name, part)
    assert gpu.main([]) == 1
    kept = json.loads((tmp_path / "cuda-nvidia-test-1.json").read_text())
    assert set(kept["errors"]) == {"parity", "training", "benchmarks"} and len(kept["benchmarks"]) == 1
    assert "an illegal memory access" in (tmp_path / "cuda-nvidia-test-1.md").read_text()
    assert "parity did not run: RuntimeError: CUDA error" in capsys.readouterr().out


def test_whatever_a_peer_raises_it_is_absent_and_ours_is_a_failure(monkeypatch):
    monkeypatch.setattr(gpu, "seconds_per_call", lambda call, count: 1e-3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def broken():
        raise ImportError("no module\nat all")

    case = gpu_cases.Case("x", "s", {"ours": lambda: None, "a": lambda: None, "b": broken})
    rows = list(gpu.measure(case, 1.0))
    assert [r["peer"] for r in rows] == ["a", "b"] and rows[1]["absent"] == "ImportError: no module"
    (only,) = gpu.measure(gpu_cases.Case("x", "s", {"ours": broken, "a": lambda: None}), 1.0)
    result = {"machine": {}, "parity": [], "device": {}, "benchmarks": [only]}
    assert gpu.failures(result)[0] == "training has not run"
    assert "x s did not run: ImportError" in gpu.failures(result)[1]


class Fake(Cuda):
    """The simulator with what the checks need of a device; work in a graph runs at once, and once only."""

    clock, peak, now = 0.0, 0, 0

    @contextlib.contextmanager
    def capture(self):
        yield types.SimpleNamespace(replay=lambda: None)

    def event(self):
        return types.SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)

    def memory_stats(self):
        return {"allocated": 0, "peak": 64 << 20, "reserved": 64 << 20, "total": 1 << 30}


@pytest.fixture
def fake():
    backend = Fake(simulate=True)
    if not backend.probe().ok:
        pytest.skip(backend.probe().reason)
    backend.build()
    with hal.activated(backend):
        yield backend


def test_the_checks_of_a_device_make_valid_calls_of_every_implementation(fake):
    found = gpu_checks.run(fake)
    assert {n for n, wrong in found.items() if wrong} == {"memory statistics"}
    assert "0 bytes" not in found["memory statistics"] and "64 MiB show as [0, 67108864]" in found["memory statistics"]
    assert sum(n.startswith("graph of") for n in found) == sum(map(len, fake.impls.values()))


def test_a_graph_that_gives_other_bits_is_found(fake, monkeypatch):
    captured = []

    @contextlib.contextmanager
    def capture():
        with monkeypatch.context() as m:  # a kernel that was not captured leaves its output as it was
            m.setattr(launch, "run", lambda *a, **k: captured.append(a))
            yield types.SimpleNamespace(replay=lambda: None)

    fake.capture = capture
    impl = fake.impls["rms_norm"][0]
    assert "differ in bits" in gpu_checks._graph(fake, impl.op, impl) and captured


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["kernels", "attention", "train_step"])
def test_every_call_that_is_measured_is_valid(cases):
    """On the simulator, at a 64th of the sizes; peers that need Triton or a GPU may be absent."""
    backend = Cuda(simulate=True)
    if not backend.probe().ok:
        pytest.skip(backend.probe().reason)
    backend.build()
    with hal.activated(backend):
        for case in getattr(gpu_cases, cases)(64):
            assert case.calls["ours"] is not None
            case.calls["ours"]()
            if "eager" in case.calls:
                case.calls["eager"]()
