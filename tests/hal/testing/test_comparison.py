"""The tolerance rule, on numbers computed by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal import Tol
from hal.testing.comparison import Expected, equal_bits

F32 = torch.float32


def error(y, exact, native=None, tol=Tol(1e-3, 1e-2), dtype=F32, **kw):
    y, exact = torch.as_tensor(y), torch.as_tensor(exact, dtype=torch.float64)
    native = exact if native is None else torch.as_tensor(native)
    return Expected(exact, native, tol, dtype, **kw).measure(y).tolerances


def test_every_element_is_held_to_atol_plus_rtol():
    # The second element: |0.004| / (0.001 + 0.01 * 0.3) = 1; rule 2 allows 0.001 + 0.005 * 1.
    assert error([1.0, 0.304], [1.0, 0.3]) == pytest.approx(1.0, rel=1e-4)


def test_a_tensor_may_lose_half_the_relative_part_or_twice_what_the_reference_loses():
    assert error([1.009], [1.0]) == pytest.approx(0.009 / 0.006, rel=1e-4)
    assert error([1.009], [1.0], native=[1.0045]) == pytest.approx(1.0, rel=1e-3)


def test_gradients_scale_the_absolute_part_with_their_size():
    # Element 1 is tiny, but its tensor is not: the rounding error of cancellation is relative to its neighbours.
    assert error([100.0, 0.05], [100.0, 0.0], tol=Tol(1e-3, 0.0)) == pytest.approx(50.0, rel=1e-4)
    assert error([100.0, 0.05], [100.0, 0.0], tol=Tol(1e-3, 0.0), gradient=True) == pytest.approx(0.5, rel=1e-4)


def test_zero_tolerance_means_equal():
    assert error([0.5], [0.5], tol=Tol(0.0, 0.0)) == 0.0
    assert error([0.5000001], [0.5], tol=Tol(0.0, 0.0)) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_must_be_where_they_belong(bad):
    assert error([bad, 1.0], [bad, 1.0]) == 0.0
    assert error([bad, 1.0], [0.0, 1.0]) == math.inf
    assert error([0.0, 1.0], [bad, 1.0]) == math.inf
    assert error([-bad], [bad]) == (0.0 if math.isnan(bad) else math.inf)


def test_a_result_beyond_the_dtype_is_an_infinity():
    half = torch.tensor([math.inf, 1.0], dtype=torch.float16)
    assert error(half, [70000.0, 1.0], dtype=torch.float16) == 0.0
    assert error(-half, [70000.0, -1.0], dtype=torch.float16) == math.inf


def test_the_range_of_a_dtype_ends_half_a_spacing_beyond_its_largest_number():
    largest = torch.tensor([65504.0], dtype=torch.float16)
    rounded = Tol(0.0, 2.0**-10)
    assert error(largest, [65519.0], tol=rounded, dtype=torch.float16) < 1.0
    assert error(largest, [65520.0], tol=rounded, dtype=torch.float16) == math.inf
    assert error(largest * 2, [65520.0], tol=rounded, dtype=torch.float16) == 0.0


def test_a_result_of_less_precision_than_the_inputs_may_be_rounded_once():
    exact = 1.0 + 2.0**-9
    y = torch.tensor([exact]).bfloat16()
    assert error(y, [exact], tol=Tol(0.0, 1e-6)) < 1.0
    assert error(y + 2.0**-6, [exact], tol=Tol(0.0, 1e-6)) > 1.0


def test_integers_and_booleans_are_equal_or_wrong():
    assert error(torch.tensor([1, 2]), [1, 2]) == 0.0
    assert error(torch.tensor([1, 3]), [1, 2]) == math.inf
    assert error(torch.tensor([True]), [False]) == math.inf


def test_the_message_points_at_the_worst_element():
    exact = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double()
    result = Expected(exact, exact, Tol(1e-3, 0.0), F32).measure(torch.tensor([[1.0, 2.0], [3.0, 9.0]]))
    assert "at [1, 1]: got 9, float64 reference 4" in result.text


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=8))
def test_the_exact_result_has_no_error(values):
    assert error(torch.tensor(values), values) == 0.0


def test_bits():
    assert equal_bits(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert not equal_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not equal_bits(torch.tensor([1.0]), torch.tensor([1.0]).double())
    assert equal_bits(torch.tensor(1.0), torch.tensor(1.0))


def test_bits_of_a_single_element_with_a_stride():
    one = torch.tensor([1.0, 2.0])[::2]
    assert equal_bits(one, torch.tensor([1.0]))
