"""Quantisation to float8, and the products of a linear layer against float64 products of what was quantised."""

import pytest
import torch

import hal
from hal.nn import Float8Products
from hal.nn.float8_products import quantize
from hal.ops.float8 import dequantize
from hal.testing import Reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Half of the distance of adjacent numbers, relative to the smaller."""


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    "shape, blocks_of, scales",
    [
        ((3, 5), "tensor", ()),
        ((2, 3, 300), "row", (2, 3, 3)),
        ((300, 140), "square", (3, 2)),
        ((4, 128), "row", (4, 1)),
    ],
)
def test_the_largest_of_a_block_is_exact_and_the_others_are_near(dtype, shape, blocks_of, scales):
    x = drawn(*shape)
    q, scale = quantize(x, dtype, blocks_of)
    assert q.dtype == dtype and scale.dtype == torch.float32 and tuple(scale.shape) == scales
    back = dequantize(q, scale)
    # Of numbers below 2^-6 (e4m3) or 2^-14 (e5m2) times the scale, the distance no longer shrinks.
    floor = scale.max() * (2.0**-10 if dtype == E4M3 else 2.0**-17)
    assert ((back - x).abs() <= x.abs() * STEP[dtype] + floor).all()
    largest = x.abs().argmax()
    assert back.flatten()[largest].item() == pytest.approx(x.flatten()[largest].item(), rel=1e-6)


def test_one_large_element_spoils_its_own_block_only():
    x = torch.full((1, 256), 0.5)
    x[0, 0] = 1e6
    q, scale = quantize(x, E4M3, "row")
    back = dequantize(q, scale)[0]
    assert (back[1:128] == 0.0).all() and (back[128:] == 0.5).all()


def test_blocks_of_zeros_stay_zero_and_what_is_not_finite_is_not_hidden():
    q, scale = quantize(torch.zeros(2, 200), E4M3, "row")
    assert (scale == 1.0).all() and (dequantize(q, scale) == 0.0).all()
    for bad in (float("nan"), float("inf")):
        x = torch.ones(1, 256)
        x[0, 7] = bad
        back = dequantize(*quantize(x, E4M3, "row"))[0]
        assert not back[7].isfinite() and (back[128:] == 1.0).all()


def test_a_given_magnitude_makes_the_scale_and_larger_elements_saturate():
    x = torch.tensor([0.5, -1.0, 3.0])
    q, scale = quantize(x, E4M3, magnitude=lambda amax: amax.mul(0.5))
    assert scale.item() == pytest.approx(1.5 / 448.0)
    assert dequantize(q, scale).tolist() == pytest.approx([0.5, -1.0, 1.5], rel=2.0**-4)


def test_the_products_ask_for_the_magnitude_of_each_operand():
    asked = []

    def twice(operand, amax):
        asked.append((operand, amax.item()))
        return amax * 2.0

    products, x, weight, dy = (
        Float8Products(magnitude=twice),
        torch.ones(4, 8),
        torch.ones(6, 8) * 2,
        torch.ones(4, 6) * 3,
    )
    with hal.activated(Reference()):
        products.forward(x, weight, None), products.input_gradient(dy, weight), products.weight_gradient(dy, x)
    one, two, three = ("x", 1.0), ("weight", 2.0), ("dy", 3.0)
    assert asked == [one, two, three, two, three, one]


def exact(products, kind, a, b):
    """a b^T in float64 of the operands as they are quantised."""
    blocks = {"rows": "row", "weight": "square"} if products.by_block else {"rows": "tensor", "weight": "tensor"}
    first, second, first_dtype = kind
    x, w = (
        dequantize(*quantize(t, dtype, blocks[what]), torch.float64)
        for t, dtype, what in ((a, first_dtype, first), (b, E4M3, second))
    )
    return x @ w.t()


@pytest.mark.parametrize("gradient", [E4M3, E5M2])
@pytest.mark.parametrize("by_block", [False, True])
def test_the_three_products_are_those_of_the_quantised_operands(by_block, gradient):
    products = Float8Products(by_block, gradient)
    x, weight, bias = drawn(3, 50, 260, seed=1), drawn(140, 260, seed=2, scale=0.06), drawn(140, seed=3)
    dy = drawn(3, 50, 140, seed=4)
    rows, dy_rows = x.flatten(0, 1), dy.flatten(0, 1)
    near = {"rtol": 1e-3, "atol": 1e-2}
    with hal.activated(Reference()):
        y = products.forward(x, weight, bias)
        dx = products.input_gradient(dy, weight)
        dw = products.weight_gradient(dy_rows, rows)
        weight_sum, bias_sum = torch.ones(140, 260), torch.ones(140)
        products.add_gradients(x, dy, weight_sum, bias_sum)
    expected = exact(products, ("rows", "weight", E4M3), rows, weight) + bias.double()
    torch.testing.assert_close(y.flatten(0, 1).double(), expected, **near)
    # The blocks of the weight are square, so that its transpose has the same ones.
    w8 = dequantize(*quantize(weight, E4M3, "square" if by_block else "tensor"), torch.float64)
    dy8 = dequantize(*quantize(dy_rows, gradient, "row" if by_block else "tensor"), torch.float64)
    torch.testing.assert_close(dx.flatten(0, 1).double(), dy8 @ w8, **near)
    expected = exact(products, ("rows", "rows", gradient), dy_rows.t(), rows.t())
    torch.testing.assert_close(dw.double(), expected, **near)
    torch.testing.assert_close(weight_sum.double(), expected + 1.0, **near)
    torch.testing.assert_close(bias_sum.double(), dy_rows.double().sum(0) + 1.0, **near)
    # Quantisation has an effect, and a small one.
    right = rows.double() @ weight.double().t() + bias.double()
    assert 1e-3 < (y.flatten(0, 1) - right).norm() / right.norm() < 0.06
