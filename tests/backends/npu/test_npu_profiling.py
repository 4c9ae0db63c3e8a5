"""--profile and its options on npu: torch's profiler on the simulator, torch_npu's own on a device."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.backends.npu import Npu
from hal.model.config.command_line import parse
from hal.model.training.run import train


def test_a_profiled_run_writes_trace_and_memory_history(npu: Npu, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(1000)))
    shape = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
    shape += " --micro-batch-size 2 --global-batch-size 2 --train-iters 3 --eval-iters 1 --sample-tokens 0"
    shape += " --attention-dropout 0 --backend npu --simulate --use-pytorch-profiler --record-memory-history"
    shape += " --profile --profile-step-start 1 --profile-step-end 2"
    train(parse([*shape.split(), "--text-file", str(text), "--run-dir", str(tmp_path / "run")]))
    folder = tmp_path / "run" / "profile"
    with gzip.open(folder / "rank-0.torch.json.gz", "rt") as file:
        assert "flash_attention (npu/fusion_attention)" in file.read()
    memory = json.loads((folder / "rank-0.json").read_text())["memory"]
    assert memory["peak"]["weights"] > 0 and memory["peak"]["optimizer"] > 0
    assert pickle.loads((folder / "snapshot_0.pickle").read_bytes())["device_traces"][0]


def test_a_device_is_recorded_by_torch_npus_profiler(npu: Npu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own Python and C++ code up to CANN's aclprofInit, which the simulator lacks, so that nothing is recorded."""
    from torch_npu import profiler

    given: list[dict[str, Any]] = []
    real = profiler.profile

    class Noted(real):  # type: ignore[misc, valid-type]
        def __init__(self, **options: Any) -> None:
            given.append(options)
            super().__init__(**options)

    monkeypatch.setattr(profiler, "profile", Noted)
    monkeypatch.setattr(npu, "simulated", False)
    with npu.profiler(str(tmp_path), "rank-3"):
        torch.ones(2, device="npu").sum()
    assert given[0]["activities"] == [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("rank-3_") and written.name.endswith("_ascend_pt")
    assert (written / "profiler_info.json").exists()
