"""Kinds of activation, and rotary tables as kernels read them."""

from __future__ import annotations

import pytest
import torch

from hal import backend_tools, ops
from hal.core.adapters import require_same_signature


def test_activations_name_their_kind_and_whether_they_are_gated() -> None:
    functions = backend_tools.activations_from(lambda *call: (call, ()))
    for op, function in zip((ops.swiglu, ops.geglu, ops.bias_gelu), functions):
        require_same_signature(op, function, op.name)
    swiglu, geglu, bias_gelu = functions
    assert swiglu(1)[0] == (1, None, "silu", True)
    assert geglu(1, 2)[0] == (1, 2, "tanh", True)
    assert bias_gelu(1, 2, "fast")[0] == (1, 2, "fast", False)


def test_rotarys_gradient_rotates_back() -> None:
    forward, backward = backend_tools.rotary_from(lambda *call: call)
    require_same_signature(ops.rotary, forward, "rotary")
    y, residuals = forward("x", "cos", "sin", layout="TND", interleaved=True)
    assert y == ("x", "cos", "sin", "TND", True, 1.0)
    assert backward(residuals, "dy") == (("dy", "cos", "sin", "TND", True, -1.0),)


TABLES = [
    *((layout, per_sample) for layout in ("SBND", "BSND", "BNSD") for per_sample in (False, True)),
    ("TND", False),
]


@pytest.mark.parametrize("layout, per_sample", TABLES)
def test_angle_strides_find_the_angles_of_every_row(layout: str, per_sample: bool) -> None:
    sizes = {"S": 3, "T": 3, "B": 2, "N": 4}
    shape = tuple(sizes[letter] for letter in layout[:-1])
    cos = torch.randn(2, 3, 5) if per_sample else torch.randn(3, 5)
    a, b, c = backend_tools.angle_strides(layout, cos)
    rows = shape if len(shape) == 3 else (1, *shape)
    angles = cos.flatten().as_strided((*rows, 5), (a, b, c, 1))
    letters = layout[:-1] if len(shape) == 3 else "-" + layout[:-1]
    for at in torch.cartesian_prod(*(torch.arange(n) for n in rows)).tolist():
        where = dict(zip(letters, at))
        token = where["T"] if "T" in where else where["S"]
        expected = cos[where["B"], token] if per_sample else cos[token]
        assert torch.equal(angles[tuple(at)], expected)
