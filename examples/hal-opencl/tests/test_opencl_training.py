"""Tests that a GPT trained on OpenCL has the same losses as on cpu_ref, and that a second run is bit-equal."""

import re
import subprocess
import sys

import pytest
import torch

import hal
from hal.testing import golden


def losses(backend, where, iterations, *options):
    command = [
        sys.executable,
        "-m",
        "hal",
        "train",
        "--backend",
        backend,
        "--config",
        "tiny",
        "--run-dir",
        str(where),
    ]
    command += [
        "--train-iters",
        str(iterations),
        "--lr-warmup-iters",
        "2",
        "--log-interval",
        "1",
        "--eval-interval",
        "1000",
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=where.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(x) for x in re.findall(r"lm loss: (\S+)", done.stdout)]


@pytest.mark.slow
def test_the_readmes_model_trains_with_the_losses_of_cpu_ref(tmp_path):
    actual, expected = (losses(name, tmp_path / name, 20) for name in ("opencl", "cpu_ref"))
    assert len(actual) == len(expected) == 20
    assert actual[-1] < actual[0] - 1.0
    assert actual == pytest.approx(expected, abs=2e-5)


def test_two_runs_have_the_same_bits(opencl):
    first, second = (golden.train("llama", torch.bfloat16, steps=3) for _ in range(2))
    assert first == second
    assert hal.fallbacks() == {}


@pytest.mark.slow
def test_two_processes_train_as_on_cpu_ref(tmp_path):
    """Tensor and sequence parallel, with dropout: a sharded vocabulary, blocks of draws, collectives."""
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --lr 1e-3"
    parallel = "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"
    options = f"{model} --hidden-dropout 0.1 --attention-dropout 0.1 {parallel}".split()
    actual, expected = (losses(name, tmp_path / name, 5, *options) for name in ("opencl", "cpu_ref"))
    assert len(actual) == 5
    assert actual == pytest.approx(expected, abs=2e-5)
