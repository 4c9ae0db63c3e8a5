"""Tests of the cuda backend that need no GPU; those that run kernels use the simulator, and need a C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_helpers import need_compiler

import hal
from hal.backends.cuda import Cuda, launch
from hal.backends.cuda.simulator.build import Simulator, library


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process, where no engine was built."""
    monkeypatch.setattr(launch, "_engine", None)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """The backend on its simulator, active for one test."""
    need_compiler()
    monkeypatch.setattr(launch, "_engine", None)
    backend = Cuda(simulate=True)
    backend.build()
    with hal.activated(backend):
        yield backend


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Simulator]:
    """Makes a simulator whose kernel file `name` has another text, and the engine of this test."""
    need_compiler()

    def make(name: str, text: str) -> Simulator:
        source = tmp_path / name
        source.write_text(text)
        engine = Simulator(library([source]))
        monkeypatch.setattr(launch, "_engine", engine)
        return engine

    return make
