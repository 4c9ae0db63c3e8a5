"""The products of float8 that torch._scaled_mm gets, and those that it would refuse."""

import pytest
import torch

from hal import ops
from hal.backends.cuda import Cuda, launch

(IMPL,) = Cuda.impls["scaled_linear"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def call(x=(2, 8, 64), weight=(32, 64), x_scale=(), weight_scale=(), formats=(E4M3, E4M3), dtype=torch.bfloat16):
    def meta(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    scales = [meta(shape, torch.float32) for shape in (x_scale, weight_scale)]
    return {
        **dict(zip(("x", "weight"), (meta(shape, d) for shape, d in zip((x, weight), formats)))),
        **dict(zip(("x_scale", "weight_scale"), scales)),
        "dtype": dtype,
    }


ROWS = {"x_scale": (2, 8, 1), "weight_scale": (32, 1)}
ACCEPTED = [{}, {"dtype": torch.float32}, {"formats": (E5M2, E4M3)}, ROWS, {**ROWS, "formats": (E5M2, E4M3)}]
REFUSED = [
    ({"weight": (33, 64)}, "multiples of 16"),
    ({"x": (3, 40), "weight": (32, 40)}, "multiples of 16"),
    ({"x": (0, 64)}, "or no rows"),
    ({"formats": (E5M2, E5M2)}, "x and weight in float8_e5m2"),
    ({"x_scale": (2, 8, 1)}, "of two kinds"),
    ({"x": (8, 256), "weight": (256, 256), "x_scale": (8, 2), "weight_scale": (2, 2)}, "scales of blocks"),
    ({**ROWS, "dtype": torch.float32}, "another result than bfloat16"),
    ({**ROWS, "formats": (E4M3, E5M2)}, "another weight than float8_e4m3fn"),
]


@pytest.mark.parametrize("how", ACCEPTED, ids=range(len(ACCEPTED)))
def test_torch_accepts_what_we_pass_it(how):
    """On meta tensors torch's own checks of shapes, strides and dtypes run, without a GPU."""
    arguments = call(**how)
    ops.scaled_linear.verify(**arguments)
    assert IMPL.refusals(ops.scaled_linear.Call(**arguments)) == ()
    y = IMPL.call(**arguments)
    assert y.shape == (2, 8, 32) and y.dtype == arguments["dtype"]


@pytest.mark.parametrize("how, text", REFUSED, ids=range(len(REFUSED)))
def test_what_torch_would_refuse_is_refused_with_the_reason(how, text):
    arguments = call(**how)
    ops.scaled_linear.verify(**arguments)
    assert text in "; ".join(IMPL.refusals(ops.scaled_linear.Call(**arguments)))


def test_a_gpu_without_float8_products_refuses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(launch, "device_type", lambda: "cpu")
    monkeypatch.setattr(launch, "simulated", lambda: False)  # tests before this one may have started the simulator
    one, x = torch.ones(()), torch.ones(16, 16).to(E4M3)
    assert any("8.9" in r for r in IMPL.refusals(ops.scaled_linear.Call(x, x, one, one, dtype=torch.float32)))
