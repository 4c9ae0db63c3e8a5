"""Loads the simulated npu backend before any test runs. torch creates its autograd queues, one per device, at the first
backward pass of a process, and a device type that is registered later gets none."""

from __future__ import annotations

import importlib.util
import os

import pytest

from hal.backends.npu import Npu


@pytest.fixture(scope="session", autouse=True)
def simulated_npu() -> Npu | None:
    """The backend, built once, or None without torch_npu. Device memory is filled with NaN when it is allocated."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    before = dict(os.environ)
    backend = Npu(simulate=True, poison=True)
    backend.build()
    os.environ.clear()  # variables that it sets for child processes must not reach other tests
    os.environ.update(before)
    return backend
