"""Megatron-LM's training scripts: what is answered to them, and how the official one trains and resumes.

The official script is not in megatron-core's wheel; name a checkout of its tag in MEGATRON_LM to run those tests.
"""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import hal
from hal.launch.worker import imports
from hal.model.megatron import hal_device
from hal.model.megatron.place import Place
from hal.model.megatron.scripts import SCRIPTS, _answering, _reported, running_script


@pytest.mark.parametrize(
    "source, yes",
    [
        ("from megatron.training import pretrain", True),
        ("import megatron.training.arguments as a", True),
        ("from megatron import training", True),
        ("def f():\n    from megatron.training import get_args", True),
        ("from megatron.core import parallel_state", False),
        ("import megatron_training", False),
        ("print('from megatron.training import x')", False),
    ],
)
def test_a_megatron_script_is_one_that_imports_its_trainer(source, yes, tmp_path):
    script = tmp_path / "s.py"
    script.write_text(source)
    assert imports(script, "megatron.training") is yes


def test_answers_are_for_one_module_alone(cpu_ref):
    before = torch.cuda.is_available(), torch.cuda.device_count()
    view = _answering(is_available=lambda: True, device_count=lambda: 3)
    assert (view.cuda.is_available(), view.cuda.device_count()) == (True, 3)
    assert view.zeros is torch.zeros and view.cuda.synchronize is torch.cuda.synchronize
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == before


def test_what_warms_up_the_device_leaves_the_hosts_stream_alone(cpu_ref):
    """Else initial weights would depend on how much a tensor-parallel size makes Megatron draw before them."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with hal_device({"torch.rand": SCRIPTS["torch.rand"]}):
        assert not torch.equal(torch.rand(2, 3, device="cuda"), torch.rand(2, 3, device="cuda"))
        assert torch.equal(torch.rand(4), expected)


def test_memory_counters_are_the_backends(cpu_ref):
    with hal_device(SCRIPTS):
        assert torch.cuda.memory_allocated() > 0
        assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() // 2
        assert torch.cuda.memory_reserved() == 0  # the host keeps no such count


def test_streams_of_the_host_are_its_only_one(cpu_ref):
    with hal_device(SCRIPTS):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.zeros(2).sum() == 0
        side.synchronize()


def test_modules_move_to_the_backends_device(cpu_ref):
    with hal_device(SCRIPTS):
        assert torch.nn.Linear(2, 2).cuda(0).weight.device == Place(hal.backend()).current()


def test_nvidias_transport_means_the_backends(cpu_ref):
    with hal_device(SCRIPTS):
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        assert torch.distributed.get_backend() == "gloo"
    finally:
        torch.distributed.destroy_process_group()


def test_a_padded_vocabulary_is_reported():
    args = SimpleNamespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=2, rank=0)
    pad = _reported(lambda size, args: -(-size // 256) * 256)
    with pytest.warns(UserWarning, match=r"vocabulary of 100 is padded to 256 .*takes part in the softmax"):
        assert pad(100, args) == 256


def test_an_exact_vocabulary_is_not_reported(recwarn):
    args = SimpleNamespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=2, rank=0)
    assert _reported(lambda size, args: size)(256, args) == 256
    assert not recwarn.list


def test_a_script_runs_under_the_routing_and_leaves_no_trace(cpu_ref, capfd, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    before = torch.zeros, torch.nn.Module.cuda
    with running_script(["my_script.py"]):
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert (torch.zeros, torch.nn.Module.cuda) == before
    assert "my_script.py imports megatron: torch.cuda means cpu in it" in capfd.readouterr().err


SCRIPT = os.environ.get("MEGATRON_LM", "")
official = [
    pytest.mark.slow,
    pytest.mark.skipif(not SCRIPT, reason="MEGATRON_LM does not name a checkout of Megatron-LM"),
]
OPTIONS = (
    "--transformer-impl local --distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--use-cpu-initialization --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
    "--attention-backend unfused --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-3 --eval-iters 1 "
    "--eval-interval 1000 --lr-decay-style constant --log-interval 1 --num-workers 0 --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0"
)
HAL = ("--spec", "hal.model.megatron", "gpt_layer_spec")


def losses(ranks, *arguments, divisor=128):
    command = [sys.executable, "-m", "hal.cli", "launch", "--backend", "cpu_ref", "--nproc-per-node", str(ranks)]
    options = [*OPTIONS.split(), "--make-vocab-size-divisible-by", str(divisor), *map(str, arguments)]
    found = subprocess.run(
        [*command, os.path.join(SCRIPT, "pretrain_gpt.py"), *options],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return [float(x) for x in re.findall(r"iteration +\d+/.*?lm loss: ([\d.E+-]+)", found.stdout)]


class TestTheOfficialScript:
    pytestmark = official

    def test_it_trains_saves_and_resumes_at_other_layouts_with_equal_losses(self, tmp_path):
        whole = losses(1)
        assert len(whole) == 6 and whole[-1] < whole[0]
        first = losses(1, "--save", tmp_path, "--save-interval", 3, "--exit-interval", 3)
        assert first == whole[:3]
        parallel = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
        # What Megatron prints as the second loss after a resume is the mean of the first two.
        resumed = [whole[3], (whole[3] + whole[4]) / 2, whole[5]]
        assert losses(4, "--load", tmp_path, *parallel, divisor=64) == pytest.approx(resumed, abs=2e-6)
        assert losses(4, "--load", tmp_path, *parallel, *HAL, divisor=64) == pytest.approx(resumed, abs=2e-6)

    def test_context_and_sequence_parallel_run_through_hals_layers(self):
        whole = losses(1)
        sequence = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
        assert losses(2, *sequence, *HAL, divisor=64) == pytest.approx(whole, abs=2e-5)
        context = ("--context-parallel-size", 2, "--no-create-attention-mask-in-dataloader")
        assert losses(2, *context, *HAL) == pytest.approx(whole, abs=2e-5)
