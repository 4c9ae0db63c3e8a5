"""A small op that exists for one test, and a backend to implement it on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hal
import hal.testing
from hal import Sample, T, Tol


@pytest.fixture
def isolated(monkeypatch):
    """Whatever a test activates or defines is gone afterwards."""
    before = dict(hal.OPS)
    monkeypatch.setenv("HAL_BACKEND", "")
    with hal.activated(hal.testing.Reference()):
        yield
    for name in set(hal.OPS) - set(before):
        del hal.OPS[name]
        hal.dispatch._fallback_counts.pop(name, None)


@pytest.fixture
def toy(isolated):
    """toy(x, w=None, *, scale=1.0) = scale * (x + w), with gradients for x and w; refuses scale 0."""

    def check(x: Tensor, w: Tensor | None = None, *, scale: float = 1.0) -> None:
        hal.require(scale != 0, "toy", "a scale that is not 0", scale, "Use zeros_like.")

    def reference(x: Tensor, w: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """scale * (x + w)."""
        return scale * (x if w is None else x + w)

    reference.__name__ = "toy"
    return hal.op(
        check=check,
        tol={torch.float32: Tol(1e-6, 1e-6)},
        samples=lambda: None,
        directed=lambda: [Sample((T((2, 3)), T((2, 3))), {"scale": 2.0})],
        grads=("x", "w"),
    )(reference)


@pytest.fixture
def make_backend():
    """make_backend(name="cpu_toy") -> a fresh Backend subclass on the CPU, without implementations."""

    def make(name="cpu_toy"):
        class Toy(hal.Backend):
            def probe(self):
                return hal.Probe(True, 1, "the CPU")

            def device(self, index=0):
                return torch.device("cpu")

            def synchronize(self):
                pass

            def comm(self, ranks=None, *, timeout=600.0):
                return hal.Solo()

        Toy.name = name
        return Toy

    return make
