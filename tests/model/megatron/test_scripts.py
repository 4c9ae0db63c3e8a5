"""Megatron-LM's training scripts: the routing they see, and how the official script trains and resumes.

The official script is not in megatron-core's wheel; name a checkout of its tag in MEGATRON_LM to run those tests.
"""

import gc
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron_lm import CHECKOUT, TRAINER, needs_checkout

import hal
from hal.cli.launch import job_of
from hal.launch.megatron import mark_path
from hal.launch.worker import _run
from hal.model.megatron import hal_device
from hal.model.megatron.device_proxy import DeviceProxy
from hal.model.megatron.scripts import _carrying_float64, _padding_warning
from hal.testing.processes import run_processes

TRAINING = {
    "megatron/training/__init__.py": "from .initialize import initialize_megatron",
    "megatron/training/initialize.py": """
import torch
def initialize_megatron():
    return [torch.cuda.is_available(), torch.cuda.device_count()]
def _warmup_jit_function():
    global drawn
    drawn = torch.rand(7, device="cuda")
""",
    "megatron/training/utils.py": "import torch",
    "megatron/training/tokenizer/__init__.py": "",
    "megatron/training/tokenizer/tokenizer.py": "def _vocab_size_with_padding(size, args): return size",
    "megatron/legacy/fused_kernels/__init__.py": "def load(args): raise RuntimeError('no CUDA compiler')",
    "train.py": """
import json, os, sys
import torch
from megatron.training import initialize_megatron

rank = int(os.environ.get("RANK", "0"))
print(json.dumps([rank, torch.zeros(1, device="cuda").device.type, *initialize_megatron(), sys.argv[1:]]))
""",
    "package/__init__.py": "",
    "package/module.py": "import train",
    "by_import.py": "import train",
    "by_runpy.py": "import runpy\nrunpy.run_path(__file__.replace('by_runpy', 'train'), run_name='__main__')",
    "by_exec.py": "name = __file__.replace('by_exec', 'train')\nexec(compile(open(name).read(), name, 'exec'))",
    "by_asking.py": "from importlib.util import find_spec\nassert find_spec('megatron.training')\nimport train",
    "checkpoint/saver_base.py": "from megatron.core import parallel_state",
    "checkpoint/convert.py": "import saver_base\nprint('converted')",
    "saver_base.py": "import megatron.core",
    "own.py": "import saver_base\nprint('saved')",
    "by_second_try.py": """
import sys
sys.modules["megatron.training.initialize"] = None
try:
    import megatron.training
except ImportError:
    del sys.modules["megatron.training.initialize"]
    import train
""",
    "within.py": "from hal.model.megatron import hal_device\nwith hal_device():\n    import train",
    "plain.py": "import torch\nprint(torch.zeros)",
    "core_alone.py": "import torch, megatron.core\nprint(torch.zeros(1, device='cuda').device)",
}
"""The parts of Megatron-LM's training package that the launcher reads, and scripts that import it in several ways."""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in TRAINING.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HAL_BACKEND", "cpu_ref")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    yield tmp_path
    for name in [*sys.modules]:
        if name.startswith(("megatron.training", "megatron.legacy", "package")) or name in ("train", "saver_base"):
            del sys.modules[name]


WAYS = ["train.py", "-m package.module", "-m train", "within.py", *(n for n in TRAINING if n.startswith("by_"))]


@pytest.mark.parametrize("command", WAYS)
def test_a_script_runs_under_the_routing_and_leaves_no_trace(command, tree, cpu_ref, capsys):
    before, finders = (torch.zeros, torch.nn.Module.cuda, torch.cuda.device_count), list(sys.meta_path)
    assert _run([*command.split(), "--an-option"], tree / "job") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [0, "cpu", True, 1, ["--an-option"]]
    assert "imports megatron.core: torch.cuda is redirected to cpu" in captured.err
    assert mark_path(tree / "job").exists()
    assert (torch.zeros, torch.nn.Module.cuda, torch.cuda.device_count) == before and sys.meta_path == finders
    assert torch.cuda.is_available() is sys.modules["megatron.training.initialize"].torch.cuda.is_available()


def test_a_script_that_fails_leaves_no_trace(tree, cpu_ref):
    before = torch.zeros
    (tree / "train.py").write_text(TRAINING["train.py"] + "raise KeyError('mine')")
    with pytest.raises(KeyError, match="mine"):
        _run(["train.py"], tree / "job")
    (tree / "megatron" / "training" / "tokenizer" / "tokenizer.py").write_text("raise ImportError('theirs')")
    for name in [n for n in sys.modules if n.startswith("megatron.training")]:
        del sys.modules[name]
    with pytest.raises(ImportError, match="theirs"):
        _run(["by_import.py"], tree / "job")
    assert torch.zeros is before


def test_other_scripts_are_left_alone(tree, cpu_ref, capsys, monkeypatch):
    assert _run(["plain.py"], tree / "job") == 0
    assert "built-in" in capsys.readouterr().out and not mark_path(tree / "job").exists()
    monkeypatch.delenv("HAL_BACKEND")
    (tree / "train.py").write_text("import megatron.training, torch\nprint(torch.zeros)")
    assert _run(["train.py"], tree / "job") == 0
    assert "built-in" in capsys.readouterr().out


def test_the_checkpoint_converter_is_refused_without_transformer_engine(tree, cpu_ref, capsys, monkeypatch):
    with pytest.raises(hal.HalError, match=r"needs Transformer Engine.*hal convert --load DIR"):
        _run(["checkpoint/convert.py"], tree / "job")
    sys.modules.pop("saver_base", None)
    monkeypatch.setattr("hal.model.megatron.scripts.importlib.util.find_spec", lambda name: name)
    assert _run(["checkpoint/convert.py"], tree / "job") == 0 and capsys.readouterr().out == "converted\n"


def test_a_module_of_the_same_name_as_the_converters_is_left_alone(tree, cpu_ref, capsys):
    assert _run(["own.py"], tree / "job") == 0 and capsys.readouterr().out == "saved\n"


def test_a_module_is_a_command_with_its_own_options():
    job, _ = job_of(["--backend", "cpu_ref", "--nproc-per-node", "2", "-m", "package.module", "-m", "--backend", "x"])
    assert job.command == ["-m", "package.module", "-m", "--backend", "x"]
    assert job.environment["HAL_BACKEND"] == "cpu_ref"


@pytest.mark.nightly
def test_launched_through_a_wrapper_and_with_megatron_core_alone(tree):
    def launch(*command):
        options = ["launch", "--backend", "cpu_ref", "--nproc-per-node", "2", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "hal", *options], capture_output=True, text=True, timeout=120, env=environment
        )

    result = launch("-m", "package.module")
    assert result.returncode == 0, result.stderr
    ranks = sorted(json.loads(line)[0] for line in result.stdout.splitlines() if line.startswith("["))
    assert ranks == [0, 1]
    alone = launch("--log-dir", str(tree / "logs"), "core_alone.py")
    assert alone.returncode == 0, alone.stderr
    assert ["cpu" in (tree / "logs" / f"worker_{rank}.log").read_text().splitlines() for rank in (0, 1)] == [True, True]


def test_what_is_drawn_on_the_device_follows_its_generator(cpu_ref):
    with hal_device():
        torch.cuda.manual_seed(3)
        state, first = torch.cuda.get_rng_state(), torch.rand(4, device="cuda")
        assert not torch.equal(torch.rand(4, device="cuda"), first)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(4, device="cuda"), first)


def test_what_warms_up_the_device_leaves_the_hosts_stream_alone(tree, cpu_ref, capsys):
    """Otherwise initial weights would depend on how many random numbers Megatron consumes before that."""
    (tree / "train.py").write_text("""
import torch
from megatron.training import initialize
torch.manual_seed(3)
expected = torch.rand(4)
torch.manual_seed(3)
initialize._warmup_jit_function()
print(torch.equal(torch.rand(4), expected), initialize.drawn.shape)
""")
    assert _run(["train.py"], tree / "job") == 0
    assert capsys.readouterr().out == "True torch.Size([7])\n"


def test_memory_counters_are_the_backends(cpu_ref):
    with hal_device():
        assert torch.cuda.memory_allocated() > 0
        assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() // 2
        assert torch.cuda.memory_reserved() == 0  # the host keeps no such count
        torch.cuda.reset_peak_memory_stats()
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0 == stats["num_ooms"]


def test_streams_of_the_host_are_its_only_one(cpu_ref):
    with hal_device():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.zeros(2).sum() == 0
        side.synchronize()


def test_modules_move_to_the_backends_device(cpu_ref):
    with hal_device():
        assert torch.nn.Linear(2, 2).cuda(0).weight.device == DeviceProxy(hal.backend()).current()


def test_nvidias_transport_means_the_backends(cpu_ref):
    with hal_device():
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        assert torch.distributed.get_backend() == "gloo"
    finally:
        torch.distributed.destroy_process_group()


def _reduced():
    """Reductions of float64 that no float32 could carry, by a process group that has no float64 of its own."""

    def refuses(*_):
        raise AssertionError("float64 reached the transport")

    hal.use("cpu_ref")
    hal.backend().comm()
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        x = torch.tensor([1.7e9 + dist.get_rank() / 1024.0, -float(dist.get_rank())], dtype=torch.float64)
        _carrying_float64(refuses)(x, op=op)
        results.append(x.tolist())
    return results


@pytest.mark.slow
def test_times_in_float64_are_reduced_where_the_transport_has_none():
    late = 1.7e9 + 1 / 1024.0
    assert run_processes(2, _reduced) == [[[1.7e9 + late, -1.0], [1.7e9, -1.0], [late, 0.0]]] * 2


def test_a_padded_vocabulary_is_reported():
    args = SimpleNamespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=2, rank=0)
    pad = _padding_warning(lambda size, args: -(-size // 256) * 256)
    with pytest.warns(UserWarning, match=r"vocabulary of 100 is padded to 256 .*takes part in the softmax"):
        assert pad(100, args) == 256


def test_an_exact_vocabulary_is_not_reported(recwarn):
    gc.collect()  # what other tests have left may warn when it is freed
    recwarn.clear()
    args = SimpleNamespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=2, rank=0)
    assert _padding_warning(lambda size, args: size)(256, args) == 256
    assert not recwarn.list


OPTIONS = (
    "--transformer-impl local --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--use-cpu-initialization --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
    "--attention-backend unfused --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-3 --eval-iters 1 "
    "--eval-interval 1000 --lr-decay-style constant --log-interval 1 --num-workers 0 --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0"
)
HAL = ("--spec", "hal.model.megatron", "gpt_layer_spec")


def losses(ranks, *arguments, divisor=128, script=CHECKOUT / "pretrain_gpt.py", backend="cpu_ref"):
    command = [sys.executable, "-m", "hal", "launch", "--backend", *backend.split(), "--nproc-per-node", str(ranks)]
    options = [*OPTIONS.split(), "--make-vocab-size-divisible-by", str(divisor), *map(str, arguments)]
    result = subprocess.run(
        [*command, str(script), *options],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return [float(x) for x in re.findall(r"iteration +\d+/.*?lm loss: ([\d.E+-]+)", result.stdout)]


class TestTheOfficialScript:
    pytestmark = needs_checkout(*TRAINER)

    def test_it_trains_saves_and_resumes_at_other_layouts_with_equal_losses(self, tmp_path):
        whole = losses(1)
        assert len(whole) == 6 and whole[-1] < whole[0]
        first = losses(1, "--save", tmp_path, "--save-interval", 3, "--exit-interval", 3)
        assert first == whole[:3]
        parallel = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
        # The second loss that Megatron prints after a resume is the mean of the first two.
        resumed = [whole[3], (whole[3] + whole[4]) / 2, whole[5]]
        assert losses(4, "--load", tmp_path, *parallel, divisor=64) == pytest.approx(resumed, abs=2e-6)
        assert losses(4, "--load", tmp_path, *parallel, *HAL, divisor=64) == pytest.approx(resumed, abs=2e-6)

    def test_context_and_sequence_parallel_run_through_hals_layers(self):
        whole = losses(1)
        sequence = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
        assert losses(2, *sequence, *HAL, divisor=64) == pytest.approx(whole, abs=2e-5)
        context = ("--context-parallel-size", 2, "--no-create-attention-mask-in-dataloader")
        assert losses(2, *context, *HAL) == pytest.approx(whole, abs=2e-5)

    def test_interleaved_stages_train_alike_in_every_run(self):
        interleaved = ("--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1)
        first, second = (losses(2, *interleaved) for _ in range(2))
        assert first == second and len(first) == 6 and first[-1] < first[0]
        assert losses(2, *interleaved, *HAL) == pytest.approx(first, abs=2e-5)

    def test_it_runs_through_a_script_of_ones_own(self, tmp_path):
        mine = tmp_path / "mine.py"
        there = str(CHECKOUT / "pretrain_gpt.py")
        mine.write_text(
            f"import runpy, sys\nsys.path.insert(0, {str(CHECKOUT)!r})\nrunpy.run_path({there!r}, run_name='__main__')"
        )
        assert losses(2, "--tensor-model-parallel-size", 2, divisor=64, script=mine) == pytest.approx(
            losses(1, *HAL), abs=2e-6
        )

    def test_context_parallelism_without_hals_layers_says_what_helps(self):
        with pytest.raises(AssertionError, match=r"--spec hal\.model\.megatron gpt_layer_spec"):
            losses(2, "--context-parallel-size", 2, "--no-create-attention-mask-in-dataloader")
