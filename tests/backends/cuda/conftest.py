"""Tests of the cuda backend that need no GPU; those that run kernels use the simulator, and need a C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_helpers import need_compiler

import hal
from hal.backends.cuda import Cuda, compile, launch
from hal.backends.cuda.simulator.build import Simulator, library


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a fresh process, in which no engine was created."""
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
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Simulator]:
    """Builds a simulator of common.h, the kernel files named in `keep`, and the files given as {name: text}.

    Other arguments are the simulator's.
    """
    need_compiler()

    def make(files: dict[str, str], keep: tuple[str, ...] = (), **limits: int) -> Simulator:
        for path in compile.KERNELS.iterdir():
            if path.name in ("common.h", *keep):
                (tmp_path / path.name).write_text(path.read_text())
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        engine = Simulator(library(tmp_path), **limits)
        monkeypatch.setattr(launch, "_engine", engine)
        return engine

    return make
