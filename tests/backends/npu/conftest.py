"""The npu backend on the simulator, for tests that need torch_npu; skipped where the wheel is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import simulated_npu as helper

import hal
from hal.backends.npu import Npu, simulator


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    with helper.restored_environment():
        yield


@pytest.fixture(scope="session")
def simulated(simulated_npu: Npu | None) -> Npu:
    if simulated_npu is None:
        pytest.skip("torch_npu is not installed (pip install 'torch-hal[npu]')")
    return simulated_npu


@pytest.fixture
def npu(simulated: Npu) -> Iterator[Npu]:
    """The backend, active for one test."""
    with hal.activated(simulated):
        yield simulated


@pytest.fixture
def machine(npu: Npu) -> Iterator[simulator.Simulator]:
    """The simulator's controls; every fault is disarmed and every setting restored afterwards."""
    running = simulator.running()
    assert running is not None
    yield running
    for fault in simulator.FAULTS:
        running.inject(fault, 0)
    for name, value in {**simulator.SETTINGS, "poison": 1}.items():
        running.set(name, value)
