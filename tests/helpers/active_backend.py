"""Fixtures that several folders import into their conftest: cpu_ref, and the npu backend on its simulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import simulated_npu as simulator
import torch

import hal
import hal.testing


@pytest.fixture
def cpu_ref() -> Iterator[hal.Backend]:
    """cpu_ref for one test. One thread: small models need no more, and waiting threads spin on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with simulator.restored_environment(), hal.activated(hal.testing.Reference()):
        yield hal.use("cpu_ref")
    torch.set_num_threads(threads)


# When this is imported, not in a fixture: transformers imports torch_npu, which needs the simulator's libraries.
_NPU = simulator.build()


@pytest.fixture
def simulated_npu() -> hal.Backend | None:
    """The npu backend on its simulator, or None where torch_npu is not installed."""
    return _NPU
