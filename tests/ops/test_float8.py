"""scaled_linear: its scales, the calls that it refuses, and devices that cannot store float8."""

import pytest
import torch
from host_backend import HostBackend
from torch_release import newer_torch

import hal
from hal import ops
from hal.ops.float8 import dequantize
from hal.testing import run

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scale_of(scale, dim, i, size):
    """The index of the scale of element `i` in a dimension of `size` elements, said the slow way."""
    n = scale.shape[dim]
    return 0 if n == 1 else i if n == size else i // 128


@pytest.mark.parametrize("shape", [(), (1, 1), (140, 1), (140, 3), (2, 3)])
def test_every_element_has_the_scale_of_its_block(shape):
    x, scale = torch.randn(140, 300).to(E4M3), torch.rand(shape)
    expected = x.double()
    for i in range(140):
        for j in range(300):
            factor = scale if scale.ndim == 0 else scale[scale_of(scale, 0, i, 140), scale_of(scale, 1, j, 300)]
            expected[i, j] *= factor
    torch.testing.assert_close(dequantize(x, scale, torch.float64), expected, rtol=1e-12, atol=0.0)


@newer_torch("no product of float8 on CPUs")
def test_the_result_is_that_of_torchs_own_product():
    x, weight = torch.randn(32, 64).to(E5M2), torch.randn(48, 64).to(E4M3)
    scales = torch.tensor(0.25), torch.tensor(3.0)
    expected = torch._scaled_mm(x, weight.t(), *scales, out_dtype=torch.float32)
    torch.testing.assert_close(ops.scaled_linear.reference(x, weight, *scales, dtype=torch.float32), expected)


ONE = torch.ones(())
WRONG = [
    ({"x": torch.ones(3, 8)}, "x of dtype float8_e4m3fn or float8_e5m2; found torch.float32"),
    ({"x": torch.ones(3, 7).to(E4M3)}, r"x of shape \[..., 8\]"),
    ({"weight": torch.ones(8).to(E4M3)}, "weight of shape"),
    ({"x_scale": ONE.double()}, "x_scale of dtype float32"),
    ({"x_scale": torch.ones(3)}, r"x_scale of shape \(\) or \(3, 1\)"),
    ({"weight_scale": torch.ones(1, 8)}, r"weight_scale of shape \(\) or \(5, 1\) or \(1, 1\)"),
    ({"dtype": torch.float64}, "dtype float32, bfloat16 or float16"),
    ({"dtype": "float32"}, "dtype"),
]


@pytest.mark.parametrize("change, text", WRONG, ids=range(len(WRONG)))
def test_wrong_calls_are_refused(change, text):
    x, weight = torch.ones(3, 8).to(E4M3), torch.ones(5, 8).to(E4M3)
    right = {"x": x, "weight": weight, "x_scale": ONE, "weight_scale": ONE, "dtype": torch.float32}
    ops.scaled_linear.verify(**right)
    with pytest.raises(hal.ContractError, match=text):
        ops.scaled_linear.verify(**{**right, **change})


class Stores(HostBackend):
    """Multiplies float32; whether it stores float8 is an argument."""

    def __init__(self, dtypes):
        self.dtypes = dtypes

    def capabilities(self):
        return hal.Capabilities(dtypes=hal.Capabilities().dtypes | self.dtypes)


Stores.impl(ops.linear, id="host/linear")(ops.linear.reference)


def test_a_device_that_stores_no_float8_declines_and_one_that_does_runs_the_composition():
    rows = run(Stores({E4M3, E5M2}), ops=["scaled_linear"], examples=3).rows
    assert {(row.status, row.implementation) for row in rows} == {("pass", "composition"), ("pass", "hal.lower")}
    rows = run(Stores(set()), ops=["scaled_linear"], examples=3).rows
    assert {row.status for row in rows} == {"declined"}
    assert all("the device stores no torch.float8_e4m3fn (capability dtypes)" in row.reasons for row in rows)


def test_dispatch_refuses_a_composition_of_a_dtype_that_the_device_does_not_store():
    x = torch.ones(3, 8).to(E5M2)
    text = r"composition of linear: refuses: the device stores no .*e5m2"
    with hal.activated(Stores(set())), pytest.raises(hal.UnsupportedOp, match=text):
        ops.scaled_linear(x, x, ONE, ONE, dtype=torch.float32)
    with hal.activated(Stores({E5M2})):
        assert ops.scaled_linear(x, x, ONE, ONE, dtype=torch.bfloat16).tolist() == [[8.0] * 3] * 3
