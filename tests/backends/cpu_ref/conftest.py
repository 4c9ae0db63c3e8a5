"""Every test here runs on cpu_ref; some choose the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import hal
from hal.backends.cpu_ref import CpuRef


@pytest.fixture(autouse=True, scope="module")
def _cpu_ref() -> Iterator[None]:
    with hal.activated(CpuRef()):
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
