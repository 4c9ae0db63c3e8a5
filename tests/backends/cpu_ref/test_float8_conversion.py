"""The conversion of float8 in C equals torch's for every value, in every kind of block."""

import pytest
import torch

from hal.backends.cpu_ref.float8 import _dequantized
from hal.ops.float8 import dequantize


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_value_is_converted_exactly(dtype):
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    actual, expected = _dequantized(x, torch.tensor(1.0)), x.float()[None]
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0, equal_nan=True)
    number = ~expected.isnan()
    assert not number.all() and torch.equal(actual.signbit()[number], expected.signbit()[number])


@pytest.mark.parametrize("shape", [(), (1, 1), (300, 1), (300, 3), (3, 3)])
@pytest.mark.parametrize("rows", ["contiguous", "columns"])
def test_scales_of_blocks(shape, rows):
    x = torch.randn(300, 260).to(torch.float8_e4m3fn)
    x = x if rows == "contiguous" else x.t().contiguous().t()
    scale = torch.rand(shape)
    torch.testing.assert_close(_dequantized(x, scale), dequantize(x, scale), rtol=0.0, atol=0.0)
