"""Packing keeps every example, never overfills a sequence, and leaves little room."""

from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from hal.model.data.finetuning.packing import pack


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_example_is_in_one_sequence_and_no_two_sequences_would_fit_into_one(lengths: list[int]) -> None:
    sequences = pack(numpy.array(lengths, numpy.int64), 20)
    assert sorted(n for sequence in sequences for n in sequence) == list(range(len(lengths)))
    filled = sorted(sum(lengths[n] for n in sequence) for sequence in sequences)
    assert all(n <= 20 for n in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > 20


def test_an_example_goes_where_it_leaves_the_least_room() -> None:
    assert pack(numpy.array([3, 6, 2, 7, 4]), 10) == [[3, 0], [1, 4], [2]]
    assert pack(numpy.array([5, 5, 5]), 5) == [[0], [1], [2]]


def test_many_examples_are_packed_tightly() -> None:
    lengths = numpy.random.RandomState(0).randint(1, 200, 5000)
    sequences = pack(lengths, 1024)
    assert len(sequences) == -(-int(lengths.sum()) // 1024)
