"""Fixtures that several folders import into their conftest: cpu_ref, and the npu backend on its simulator."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

import hal
import hal.testing


@pytest.fixture
def cpu_ref() -> Iterator[hal.Backend]:
    """cpu_ref for one test. One thread: small models need no more, and waiting threads spin on a busy machine."""
    before, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    with hal.activated(hal.testing.Reference()):
        yield hal.use("cpu_ref")
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


def _simulated() -> hal.Backend | None:
    if importlib.util.find_spec("torch_npu") is None:
        return None
    from hal.backends.npu import Npu

    before = dict(os.environ)
    backend = Npu(simulate=True, poison=True)
    backend.build()
    os.environ.clear()  # variables that it sets for child processes must not reach other tests
    os.environ.update(before)
    return backend


# When this is imported, not in a fixture: transformers imports torch_npu, which needs the simulator's libraries.
_NPU = _simulated()


@pytest.fixture
def simulated_npu() -> hal.Backend | None:
    """The npu backend on its simulator, or None where torch_npu is not installed."""
    return _NPU
