"""Saturation mode: an overflow gives the largest number and is visible only in the device's overflow flag."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hal.backends.npu import Npu

SATURATING = {"INF_NAN_MODE_ENABLE": "0", "INF_NAN_MODE_FORCE_DISABLE": "1"}

CODE = """
import hal, torch
from hal import ops
hal.use('npu', simulate=True)
def check(*values):
    grads = [torch.tensor(values, dtype=torch.float16).npu()]
    return ops.unscale_and_check(grads, 0.5).item(), grads[0].tolist()
print(check(1.0, 2.0))
y = torch.tensor([60000.0, -60000.0, 3.0], dtype=torch.float16).npu() * 2
print(y.tolist())
print(check(1.0, 2.0))
print(check(1.0, 2.0))
x = torch.tensor([1.0, 2.0]).npu().masked_fill(torch.tensor([True, False]).npu(), float('-inf'))
print(x.softmax(-1).tolist())
print(check(1.0, 2.0))
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A separate process, because torch_npu reads the mode once."""
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, env=env
    )


def test_the_overflow_flag_is_reported_once(simulated: Npu) -> None:
    fine = "(0.0, [0.5, 1.0])"
    done = run(CODE, **SATURATING)
    assert done.returncode == 0, done.stderr
    # Storing -inf is not an overflow. An overflow is a result outside the range of finite operands.
    expected = [fine, "[65504.0, -65504.0, 6.0]", fine.replace("(0.0", "(1.0"), fine, "[0.0, 1.0]", fine]
    assert done.stdout.splitlines() == expected


def test_with_infinities_only_the_gradients_count(simulated: Npu) -> None:
    done = run(CODE)
    assert done.returncode == 0, done.stderr
    fine = "(0.0, [0.5, 1.0])"
    assert done.stdout.splitlines() == [fine, "[inf, -inf, 6.0]", fine, fine, "[0.0, 1.0]", fine]


TRAIN = """
import json, sys
from pathlib import Path
from hal.model.training.run import main
folder = Path(sys.argv[1])
(folder / 'text.txt').write_text('the quick brown fox jumps over the lazy dog. ' * 200)
words = '--backend npu --simulate --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-2'
words += ' --max-position-embeddings 16 --micro-batch-size 2 --train-iters 12 --log-interval 1 --fp16'
words += ' --initial-loss-scale 33554432 --hysteresis 1 --attention-dropout 0'
code = main([*words.split(), '--text-file', str(folder / 'text.txt'), '--run-dir', str(folder)])
print('losses', code, [loss for _, loss in json.loads((folder / 'run.json').read_text())['losses']])
"""


@pytest.mark.slow
def test_training_in_fp16_finds_its_loss_scale_in_both_modes(simulated: Npu, tmp_path: Path) -> None:
    """Too large a scale overflows in backward; both modes skip those steps, lower the scale, and then train equally."""
    runs = []
    for mode in (SATURATING, {}):
        done = run(TRAIN, str(tmp_path), **mode)
        scales = re.findall(r"loss scale: ([0-9.]+)", done.stdout)
        losses = [line for line in done.stdout.splitlines() if line.startswith("losses 0")]
        assert len(scales) == 12 and losses, done.stdout + done.stderr
        assert float(scales[-1]) < float(scales[0])
        runs.append((scales, losses))
    assert runs[0] == runs[1]
