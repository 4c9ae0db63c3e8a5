"""Loads the simulated npu backend before any test runs. torch creates its autograd queues, one per device, at the first
backward pass of a process, and a device type that is registered later gets none."""

from __future__ import annotations

import pytest
import simulated_npu as simulator

from hal.backends.npu import Npu


@pytest.fixture(scope="session", autouse=True)
def simulated_npu() -> Npu | None:
    """The backend on its simulator, built once, or None without torch_npu."""
    return simulator.build()
