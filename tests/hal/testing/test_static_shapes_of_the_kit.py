"""On a device that compiles for shapes, the random calls of the kit have few shapes."""

import dataclasses

import pytest
import torch
from planted import Cpu, plant

from hal import ops
from hal.testing import kit


class CompilesForShapes(Cpu):
    def capabilities(self):
        return dataclasses.replace(super().capabilities(), static_shapes=True)


@pytest.mark.parametrize("backend, few", [(Cpu, False), (CompilesForShapes, True)])
def test_random_calls_have_few_shapes(monkeypatch, backend, few):
    shapes = []

    def swiglu(x, bias):
        shapes.append((x.shape, bias is None))
        return ops.swiglu.reference(x, bias)

    monkeypatch.setattr(kit, "_edge_cases", lambda subject, tally: [])
    kit.run(plant(ops.swiglu, swiglu, backend=backend), ops=["swiglu"], examples=40, dtypes={torch.float32})
    assert (len(set(shapes)) <= kit._COMPILED_SHAPES + 2) == few
