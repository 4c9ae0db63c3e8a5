"""A small op that is defined for one test, and a backend to implement it on."""

from __future__ import annotations

import pytest
import torch
from host_backend import HostBackend
from torch import Tensor

import hal
import hal.testing
from hal import Sample, TensorSpec, Tol


@pytest.fixture
def isolated(monkeypatch):
    """Removes whatever a test activated or defined."""
    before = dict(hal.OPS)
    monkeypatch.setenv("HAL_BACKEND", "")
    with hal.activated(hal.testing.Reference()):
        yield
    for name in set(hal.OPS) - set(before):
        del hal.OPS[name]
        hal.core.dispatch._fallback_counts.pop(name, None)


@pytest.fixture
def toy(isolated):
    """toy(x, w=None, *, scale=1.0) = scale * (x + w), with gradients for x and w; refuses scale 0."""

    def check(call: hal.Call) -> None:
        hal.require(call.scale != 0, "toy", "a scale that is not 0", call.scale, "Use zeros_like.")

    def reference(x: Tensor, w: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """scale * (x + w)."""
        return scale * (x if w is None else x + w)

    reference.__name__ = "toy"
    return hal.op(
        check=check,
        tol={torch.float32: Tol(1e-6, 1e-6)},
        samples=lambda: None,
        edge_cases=lambda: [Sample((TensorSpec((2, 3)), TensorSpec((2, 3))), {"scale": 2.0})],
        grads=("x", "w"),
    )(reference)


@pytest.fixture
def make_backend():
    """make_backend(name="cpu_toy") -> a fresh Backend subclass on the CPU, without implementations."""

    def make(name="cpu_toy"):
        class Toy(HostBackend):
            pass

        Toy.name = name
        return Toy

    return make
