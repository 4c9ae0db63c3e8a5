"""A world of one process, with megatron-core's groups, on the cpu_ref backend."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def megatron_core():
    """Imported before any test that redirects torch's functions, and not when the tests of other folders are collected,
    because it takes 3 s."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: megatron)")
    pytest.importorskip("psutil", reason="psutil is not installed (extra: megatron)")


@pytest.fixture
def world(cpu_ref):
    """This process is rank 0 of 1 in torch.distributed and in megatron-core; the world ends with the test."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
