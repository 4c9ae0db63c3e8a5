"""The whole backend on the simulator: the conformance kit and a training run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cuda_helpers import need_compiler, run_python

from hal import testing

pytestmark = pytest.mark.slow


def test_every_implementation_passes_the_conformance_kit(simulated):
    report = testing.run(simulated, examples=8)
    assert report.ok, "\n".join(map(str, report.failed))
    assert not report.missing
    named = {row.implementation for row in report.rows if any("stand-in" in r for r in row.reasons)}
    attention = {"cuda/flash", "cuda/fa3", "cuda/fa4", "cuda/cudnn", "cuda/sdpa", "cuda/flex"}
    assert named == attention | {"cuda/torch", "cuda/cublaslt", "cuda/symm_mem"}
    assert all(row.simulated for row in report.rows)


SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 2 --train-iters 12 --lr 1e-2 --bf16"
    " --attention-dropout 0.1 --hidden-dropout 0.1 --swiglu --tokenizer-type ByteTokenizer --sample-tokens 0"
)


def test_training_on_the_simulator_follows_cpu_ref(tmp_path: Path):
    """The same bits are dropped and the same numbers rounded, so losses differ by rounding only."""
    need_compiler()
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}. " for i in range(3000)))
    losses = {}
    for backend, extra in (("cuda", ["--simulate"]), ("cpu_ref", [])):
        run_dir = tmp_path / backend
        arguments = ["train", "--backend", backend, *extra, *SHAPE.split()]
        arguments += ["--text-file", str(text), "--run-dir", str(run_dir)]
        done = run_python(f"import sys, hal.cli\nsys.exit(hal.cli.main({arguments!r}))\n")
        assert done.returncode == 0, done.stderr
        run = json.loads((run_dir / "run.json").read_text())
        assert not run["fallbacks"]
        losses[backend] = [loss for _, loss in run["losses"]]
    worst = max(abs(a - b) for a, b in zip(losses["cuda"], losses["cpu_ref"]))
    assert len(losses["cuda"]) == 12 and losses["cuda"][-1] < losses["cuda"][0] - 0.5
    assert worst < 0.01, losses
