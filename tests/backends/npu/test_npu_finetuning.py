"""Finetuning on the simulator: packed examples of messages train as on cpu_ref."""

from __future__ import annotations

from pathlib import Path

import finetuning
import pytest
import torch

import hal
from hal.backends.cpu_ref import CpuRef
from hal.backends.npu import Npu
from hal.testing import golden

pytestmark = pytest.mark.slow


def losses(backend: hal.Backend, folder: Path) -> torch.Tensor:
    words = ["--packing", "--seq-length", 96, "--micro-batch-size", 2, "--lr", 3e-3]
    with hal.activated(backend):
        run = finetuning.trainer(folder / "llama", "--data-path", folder / "train.jsonl", *words)
        return torch.tensor([run.step().loss for _ in range(run.config.train_iters)])


def test_packed_examples_train_as_on_cpu_ref(simulated: Npu, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers (extra: transformers)")
    finetuning.save_llama(tmp_path / "llama")
    finetuning.write_lines(tmp_path / "train.jsonl", finetuning.conversations(24))
    npu, reference = losses(simulated, tmp_path), losses(CpuRef(), tmp_path)
    assert len(npu) == 7 and npu[-1] < npu[0] - 0.3
    assert torch.allclose(npu, reference, rtol=0, atol=golden.TOL[torch.float32].atol)
