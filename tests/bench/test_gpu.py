"""`make gpu` cannot run here; what can be checked is that its calls are valid, and what its report says of numbers."""

from __future__ import annotations

import pytest
import torch

import hal
from hal.backends.cuda import Cuda
from hal.bench import gpu


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
    assert gpu.missed(row(**attention, peer="cuda/cudnn", ratio_median=0.9)) == ""


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
    text = gpu.markdown(result)
    assert "| rotary | float32 | cuda/kernel | pass | 3 | 0.123 |" in text
    assert "| 1.50 | 1.40..1.60 | 10.0 us | 90% |" in text and "no Triton" in text and "0.0010" in text


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["kernels", "attention", "train_step"])
def test_every_call_that_is_measured_is_valid(cases):
    """On the simulator, at a 64th of the sizes; peers that need Triton or a GPU may be absent."""
    from hal.bench import gpu_cases

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
