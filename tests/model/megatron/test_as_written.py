"""Programs that say "cuda" run as they are under `hal launch`: the sources' notebook, and Megatron-LM's own scripts."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_lm import CHECKOUT, TRAINER, needs_checkout

pytestmark = pytest.mark.nightly
BACKENDS = {"cpu_ref": (), "npu": ("--simulate",), "cuda": ("--simulate",)}


def run(backend, ranks, script, folder, *arguments):
    """What all ranks of a script print that ends by itself, without an error."""
    if backend == "npu" and find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed (extra: npu)")
    command = [sys.executable, "-m", "hal", "launch", "--backend", backend, *BACKENDS[backend]]
    logs = folder / "logs"
    command += ["--nproc-per-node", str(ranks), "--log-dir", str(logs), str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["PYTHONPATH"] = os.environ.get("MEGATRON_LM", "")
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, env=environment)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return "".join(log.read_text() for log in sorted(logs.rglob("*.log")))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cells_of_the_notebook(backend, tmp_path):
    output = run(backend, 4, Path(__file__).with_name("notebook_cells.py"), tmp_path)
    losses = [float(x) for x in re.findall(r"Losses reduced :\[\{'lm loss': tensor\(([\d.]+)", output)]
    assert output.count("Broadcast assertion passed") == 1 and output.count("gathered") == 4
    assert len(losses) == 20 and output.count("Successfully loaded the model") == 4


class TestMegatronsScripts:
    pytestmark = needs_checkout(*TRAINER)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_simple_training_loop(self, backend, tmp_path):
        output = run(backend, 2, CHECKOUT / "examples" / "run_simple_mcore_train_loop.py", tmp_path)
        losses = re.findall(r"Iteration \d: Losses reduced: \[\{'lm loss': tensor\(([\d.]+)", output)
        assert sorted(losses) == sorted(2 * ["4.6045", "4.6045", "4.6083", "4.6042", "4.6061"])

    @pytest.mark.parametrize(
        "more",
        ["", "--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --bf16"],
    )
    def test_experts(self, more, tmp_path):
        from test_scripts import losses

        options = ["--num-experts", 4, "--moe-router-topk", 2, "--disable-bias-linear", *more.split()]
        result = losses(1, *options)
        tolerance = 5e-3 if "--bf16" in more else 2e-6
        assert result[:4] == pytest.approx([4.885973, 4.801611, 4.545811, 4.323309], abs=tolerance)
