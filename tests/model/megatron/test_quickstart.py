"""megatron-core's quickstart runs through `hal launch`: it trains, saves, loads, and loads at another layout."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import hal
from hal.testing.processes import run_processes

EXAMPLE = Path(hal.__file__).resolve().parent.parent / "examples" / "megatron_quickstart.py"
BACKENDS = [("cpu_ref", []), ("npu", ["--simulate"])]

pytestmark = pytest.mark.slow


def launch(backend, ranks, *arguments):
    name, options = backend
    command = [sys.executable, "-m", "hal", "launch", "--backend", name, *options, "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, str(EXAMPLE), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return [float(x) for x in re.findall(r"step \d: loss ([\d.]+)", result.stdout)], result.stdout


def require(backend):
    if backend == "npu" and find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed (extra: npu)")


@pytest.mark.parametrize(
    "backend", [pytest.param(BACKENDS[0], marks=pytest.mark.nightly), BACKENDS[1]], ids=lambda b: b[0]
)
def test_the_quickstart(backend, tmp_path):
    require(backend[0])
    losses, output = launch(backend, 2, "--save", tmp_path / "two")
    assert len(losses) == 5 and losses[-1] < losses[0] and "saved and loaded: the same" in output
    # At the checkpoint, the evaluation loss depends neither on the layout nor on the use of HAL's ops.
    at_two, _ = launch(backend, 2, "--load", tmp_path / "two")
    at_four, _ = launch(backend, 4, "--load", tmp_path / "two")
    with_hal, _ = launch(backend, 4, "--load", tmp_path / "two", "--spec", "hal")
    assert at_two == pytest.approx(at_four, abs=2e-6) and at_two == pytest.approx(with_hal, abs=2e-6)
    assert at_two[0] < losses[0]


def notebook_checks(backend, options):
    """broadcast_data and the copy, reduce and gather pairs, checked as in the tensor-parallel notebook."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import mappings, utils
    from megatron.core.tensor_parallel.data import broadcast_data

    from hal.model.megatron import hal_device, join_world

    hal.use(backend, **options)
    with hal_device():
        join_world()
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        device = torch.zeros(1).cuda().device
        ps.initialize_model_parallel(2, size // 2)
        mine = {key: torch.full((8, 8), float(key + 10 * rank), device=device) for key in range(8)}
        data = broadcast_data([0, 1], mine, torch.float32)
        # From the first rank of each tensor-parallel group, not from global rank 0.
        source = rank // 2 * 2
        assert [data[key].cpu().unique().tolist() for key in (0, 1)] == [[10.0 * source], [10.0 * source + 1]]
        pair = torch.full((2, 4), float(rank), device=device)
        gathered = utils.gather_split_1d_tensor(pair)
        assert gathered.tolist() == [float(source)] * 8 + [float(source + 1)] * 8
        ps.destroy_model_parallel()

        ps.initialize_model_parallel(size, 1)
        x = torch.full((1,), float(rank), device=device, requires_grad=True)
        total = float(sum(range(size)))
        copied = mappings.copy_to_tensor_model_parallel_region(x)
        (copied * float(rank)).sum().backward()
        assert copied.item() == rank and x.grad.item() == total
        reduced = mappings.reduce_from_tensor_model_parallel_region(x.detach().clone())
        assert reduced.item() == total
        whole = mappings.gather_from_tensor_model_parallel_region(x.detach().view(1, 1))
        assert whole.tolist() == [[float(r) for r in range(size)]]
        assert mappings.scatter_to_tensor_model_parallel_region(whole).item() == rank
        ps.destroy_model_parallel()


@pytest.mark.parametrize("backend, options", [("cpu_ref", {}), ("npu", {"simulate": True})], ids=["cpu_ref", "npu"])
def test_the_notebooks_checks(backend, options):
    require(backend)
    run_processes(4, notebook_checks, backend, options)
