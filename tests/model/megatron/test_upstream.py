"""Megatron-LM's own unit tests: those that pass on the host with a hand-written shim also pass under HAL."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from megatron_lm import CHECKOUT, TRAINER, needs_checkout

import hal

PLUGINS = Path(__file__).resolve().parents[2] / "helpers" / "upstream"
PARTS = {
    1: (
        "data/test_builder.py",
        "data/test_gpt_dataset.py",
        "dist_checkpointing/test_fully_parallel.py",
        "dist_checkpointing/test_mapping.py",
        "dist_checkpointing/test_serialization.py",
        "dist_checkpointing/test_torch_dist.py",
        "fusions",
        "models/test_base_embedding.py",
        "models/test_gpt_model.py",
        "pipeline_parallel/test_schedules.py",
        "tensor_parallel",
        "test_argument_utils.py",
        "test_basic.py",
        "test_hyper_comm_grid.py",
        "test_local_multi_tensor_fns.py",
        "test_num_microbatches_calculator.py",
        "test_optimizer.py",
        "test_optimizer_param_scheduler.py",
        "test_parallel_state.py",
        "test_process_groups_config.py",
        "test_utils.py",
        "transformer/test_attention.py",
        "transformer/test_core_attention.py",
        "transformer/test_mlp.py",
        "transformer/test_module.py",
        "transformer/test_multi_token_prediction.py",
        "transformer/test_rope.py",
        "transformer/test_spec_customization.py",
        "transformer/test_transformer_block.py",
        "transformer/test_transformer_layer.py",
    ),
    8: ("tensor_parallel",),
}
"""Number of processes -> the parts of tests/unit_tests that run on that many."""
AT_LEAST = {1: 380, 8: 17}
"""Approximate number of tests that passed when this was written: fewer indicate another missing requirement."""


def passed(processes, plugin, folder):
    """The tests that pass on rank 0, as "class::name"."""
    report = folder / f"{plugin}.xml"
    tests = ["-p", plugin, "-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors", "-q"]
    tests += ["--tb=line", "-W", "ignore", *(f"tests/unit_tests/{part}" for part in PARTS[processes])]
    launched = ["-m", "hal", "launch", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launched if processes > 1 else []), "-m", "pytest", *tests]
    path = [str(CHECKOUT), str(PLUGINS), str(Path(hal.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    inherited = {name: value for name, value in os.environ.items() if name != "HAL_BACKEND"}
    result = subprocess.run(
        [*command, "--junitxml", str(report)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=400,
        env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
    )
    assert report.exists(), result.stdout[-3000:] + result.stderr[-3000:]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    print(result.stdout[-300:])
    return {f"{case.get('classname')}::{case.get('name')}" for case in cases if len(case) == 0}


@pytest.mark.parametrize("processes", PARTS)
class TestUpstream:
    pytestmark = needs_checkout(*TRAINER, "einops", "mock", "pytest_mock", "requests")

    def test_what_passes_under_a_shim_written_by_hand_passes_under_hal(self, processes, tmp_path):
        by_hand, by_hal = (passed(processes, plugin, tmp_path) for plugin in ("under_shim", "under_hal"))
        print(f"{processes} processes: {len(by_hand)} pass under the shim, {len(by_hal)} under HAL")
        assert not by_hand - by_hal
        assert len(by_hand) >= AT_LEAST[processes]
