"""Sampling filters as defined: temperature, then top-k, then top-p on the rest; contradictions are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.model.config.schema import ConfigError
from hal.model.inference.sampling import Sampling

LOGITS = torch.tensor([0.1, 2.0, -1.0, 2.0, 1.0])


def kept(sampling, logits=LOGITS):
    return [i for i, p in enumerate(sampling.probabilities(logits).tolist()) if p > 0]


def test_each_filter():
    assert kept(Sampling()) == [0, 1, 2, 3, 4]
    assert kept(Sampling(0.0)) == [1]  # of equal logits, the lower id
    assert kept(Sampling(top_k=1)) == [1]
    assert kept(Sampling(top_k=2)) == [1, 3]
    assert kept(Sampling(top_k=9)) == [0, 1, 2, 3, 4]
    # Probabilities: 0.38, 0.38, 0.14, 0.06, 0.02.
    assert kept(Sampling(top_p=0.3)) == [1]
    assert kept(Sampling(top_p=0.5)) == [1, 3]
    assert kept(Sampling(top_p=0.85)) == [1, 3, 4]
    assert kept(Sampling(top_p=1.0)) == [0, 1, 2, 3, 4]
    # top-p is computed over the ids that top-k kept: 0.42, 0.42, 0.16.
    assert kept(Sampling(top_k=3, top_p=0.8)) == [1, 3]


def test_at_the_edges_of_the_filters():
    # The smallest set whose probabilities sum to at least top_p: with four of a quarter each, two reach exactly a half.
    assert kept(Sampling(top_p=0.5), torch.zeros(4)) == [0, 1]
    # In float64 the first probability alone is already 1, but top_p=1.0 must not remove the second.
    assert kept(Sampling(top_k=2, top_p=1.0), torch.tensor([0.0, -40.0])) == [0, 1]
    # Of many equal probabilities the lower ids are kept, which requires a stable sort.
    assert kept(Sampling(top_k=3), torch.zeros(1000)) == kept(Sampling(top_p=0.0025), torch.zeros(1000)) == [0, 1, 2]
    assert Sampling(top_k=1).probabilities(LOGITS).tolist() == [0, 1, 0, 0, 0]
    assert Sampling(0.0, top_p=1.0).greedy and not Sampling(top_k=2).greedy and not Sampling(top_p=0.1).greedy
    # A greedy choice does not depend on the number.
    assert [s.choose(LOGITS, 0.9) for s in (Sampling(0.0), Sampling(top_k=1))] == [1, 1]
    # The first id whose cumulative probability exceeds the number; equality is not sufficient.
    assert [Sampling().choose(torch.zeros(4), u) for u in (0.0, 0.24, 0.25, 0.5, 0.75)] == [0, 0, 1, 2, 3]


def test_temperature_divides_the_logits_and_what_is_kept_keeps_its_ratios():
    torch.testing.assert_close(Sampling(2.0).probabilities(LOGITS), torch.softmax(LOGITS.double() / 2.0, 0))
    p = Sampling(0.7, top_k=3).probabilities(LOGITS)
    full = torch.softmax(LOGITS.double() / 0.7, 0)
    torch.testing.assert_close(p[[1, 3, 4]], full[[1, 3, 4]] / full[[1, 3, 4]].sum())


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.3, 1.0, 5.0]),
    st.integers(0, 5),
    st.sampled_from([0.1, 0.9, 1.0]),
)
def test_the_choice_is_inverse_transform_sampling(values, uniform, temperature, top_k, top_p):
    sampling, logits = Sampling(temperature, top_k, top_p), torch.tensor(values)
    chosen, p = sampling.choose(logits, uniform), sampling.probabilities(logits)
    assert p[chosen] > 0
    if not sampling.greedy:
        assert p[:chosen].sum() <= uniform + 1e-12 and uniform <= p[: chosen + 1].sum() + 1e-12


def test_never_an_id_without_probability():
    # The largest uniform number, where rounding could select an id past the end.
    assert Sampling(top_k=2).choose(LOGITS, 1 - 2**-24) == 3
    assert Sampling().choose(torch.tensor([0.0, -1e9]), 1 - 2**-24) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="must be"):
        Sampling(**wrong)


def test_what_would_be_ignored_is_refused():
    with pytest.raises(ConfigError, match="would be ignored"):
        Sampling(temperature=0.0, top_k=5)
    with pytest.raises(ConfigError, match="would be ignored"):
        Sampling(temperature=0.0, top_p=0.9)


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-38, 9e-5])
def test_a_temperature_too_low_to_divide_by_says_what_to_do(temperature):
    with pytest.raises(ConfigError, match=r"at least 0\.0001, or 0 for the most likely token"):
        Sampling(temperature)
    far = torch.tensor([-1e30, 3e38, -3e38])  # about the largest logits of float32
    assert Sampling(1e-4).choose(far, 1 - 2**-24) == 1
