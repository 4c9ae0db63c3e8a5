"""Rng: an immutable value, forked by name, restricted to blocks."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal import ContractError, Rng, dropout_threshold

U64 = st.integers(0, 2**64 - 1)
NAMES = st.lists(st.text(max_size=4) | st.integers(-5, 5), min_size=1, max_size=3)


@given(U64, U64, NAMES, NAMES)
def test_forks_are_a_function_of_the_names_and_nothing_else(seed, offset, a, b):
    rng = Rng(seed, offset)
    first = rng.fork(*a)
    rng.fork(*b)  # drawing another stream in between changes nothing
    assert rng.fork(*a) == first
    assert (rng.fork(*b) == first) == (repr(a) == repr(b))
    assert rng == Rng(seed, offset)


def test_names_do_not_run_into_each_other():
    rng = Rng(0)
    assert len({rng.fork("ab"), rng.fork("a", "b"), rng.fork("a").fork("b"), rng.fork(1), rng.fork("1")}) == 5


def test_forks_of_different_streams_differ():
    assert Rng(1).fork("x") != Rng(2).fork("x")
    assert Rng(1, 0).fork("x") != Rng(1, 1).fork("x")


def test_a_fork_is_the_same_in_every_version():
    # Checkpoints store two integers and expect the same dropout after an upgrade.
    assert Rng(0).fork("golden").state() == (5140621927127133521, 0)


@given(U64, U64)
def test_the_state_restores_it(seed, offset):
    rng = Rng(seed, offset)
    assert Rng(*rng.state()) == rng
    assert pickle.loads(pickle.dumps(rng)) == rng


def test_elements_are_numbered_row_by_row():
    assert Rng(1).indexing((2, 3, 4)) == (0, (12, 4, 1))
    assert Rng(1).block((5, 6, 7), (1, 2, 3)).indexing((2, 2, 2)) == (1 * 42 + 2 * 7 + 3, (42, 7, 1))
    assert Rng(1).indexing(()) == (0, ())
    assert Rng(1).block((4,), (4,)).indexing((0,)) == (4, (1,)), "an empty block at the end"


@pytest.mark.parametrize(
    "shape, fits",
    [
        ((2**62,), True),
        ((2**31, 2**31), True),
        ((2**62 + 1,), False),
        ((2**31, 2**31 + 1), False),
        ((2**61, 4), False),
        ((0, 2**62 + 1), False),
        ((0, 2**31, 2**32), False),
    ],
)
def test_a_draw_has_at_most_as_many_elements_as_64_bits_can_index(shape, fits):
    if fits:
        assert Rng(1).indexing(shape)[0] == 0
    else:
        with pytest.raises(ContractError, match=r"at most 2\*\*62 elements"):
            Rng(1).indexing(shape)


@given(st.data())
def test_the_indices_of_a_block_are_those_of_its_place_in_the_draw(data):
    full = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in full)
    size = tuple(data.draw(st.integers(0, n - i)) for n, i in zip(full, start))
    whole, strides = Rng(5).indexing(full)
    assert whole == 0
    index0, block_strides = Rng(5).block(full, start).indexing(size)
    assert block_strides == strides
    assert index0 == sum(i * s for i, s in zip(start, strides))
    assert strides[-1] == 1


@pytest.mark.parametrize("bad", [-1, 2**64, 1.5, "1"])
def test_seed_and_offset_are_unsigned_64_bit_integers(bad):
    with pytest.raises(ContractError, match=r"seed must be an integer in \[0, 2\*\*64\)"):
        Rng(bad)
    with pytest.raises(ContractError, match="offset must be"):
        Rng(0, bad)
    assert Rng(2**64 - 1).state() == (2**64 - 1, 0)


def test_wrong_blocks_and_forks_are_refused():
    with pytest.raises(ContractError, match="at least one name"):
        Rng(0).fork()
    with pytest.raises(ContractError, match=r"start \(5,\) does not lie in a draw of shape \(4,\)"):
        Rng(0).block((4,), (5,))
    with pytest.raises(ContractError, match="does not lie"):
        Rng(0).block((4, 4), (1,))
    with pytest.raises(ContractError, match="does not fit the block's draw"):
        Rng(0).block((4,), (2,)).indexing((3,))
    with pytest.raises(ContractError, match="does not fit"):
        Rng(0).block((4,), (2,)).indexing((1, 1))


def test_the_threshold_is_the_least_integer_that_is_kept():
    assert dropout_threshold(0.0) == 0
    assert dropout_threshold(0.5) == 1 << 23
    assert dropout_threshold(3 / (1 << 24)) == 3
    assert dropout_threshold(3.5 / (1 << 24)) == 4


def test_it_is_immutable_and_hashable():
    rng = Rng(1, 2)
    with pytest.raises(AttributeError):
        rng.offset = 3
    assert {rng: "x"}[Rng(1, 2)] == "x"
