"""Sequence shards: those of all ranks partition the sequence, and random numbers do not depend on the sharding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.model.parallel.sequence_shard import SequenceShard
from hal.ops.random import element_index, philox_bits


@given(size=st.integers(1, 9), c=st.integers(1, 4))
def test_balanced_rows_partition_the_sequence_and_the_causal_work(size: int, c: int) -> None:
    ranks = [SequenceShard.zigzag(2 * size * c, r, size) for r in range(size)]
    assert sorted(torch.cat([r.positions() for r in ranks]).tolist()) == list(range(2 * size * c))
    assert len({int((r.positions() + 1).sum()) for r in ranks}) == 1, "all ranks have as many (query, key) pairs"


@given(size=st.integers(1, 9), c=st.integers(1, 3), rank=st.integers(0, 8), batch=st.integers(1, 3))
def test_a_part_draws_what_the_whole_would(size: int, c: int, rank: int, batch: int) -> None:
    rank %= size
    full, h, rng = 2 * size * c, 3, hal.Rng(7, 5)
    whole = philox_bits(element_index((full, 4, h), rng), rng)
    for rows in (
        SequenceShard.zigzag(full, rank, size),
        SequenceShard.all_of(full).part(rank, size),
        SequenceShard.all_of(full),
    ):
        local, seen = rows.draw(rng, (rows.count, batch, h), (4, h), (1, 0))
        mine = philox_bits(element_index(seen, local), local).view(rows.count, batch, h)
        assert torch.equal(mine, rows.take(whole, 0)[:, 1 : 1 + batch])


def test_sequence_parallel_parts_of_context_parallel_rows() -> None:
    rows = SequenceShard.zigzag(16, 1, 2)  # chunks 1 and 2 of four
    assert rows.runs == ((4, 4), (8, 4))
    assert [rows.part(r, 2).runs for r in range(2)] == [((4, 4),), ((8, 4),)]
    assert rows.part(1, 4).runs == ((6, 2),)
    with pytest.raises(hal.ContractError, match="cannot divide"):
        rows.part(0, 3)
    with pytest.raises(hal.ContractError, match="2 x 3 chunks"):
        SequenceShard.zigzag(16, 0, 3)


@pytest.mark.parametrize(
    "runs",
    [
        ((0, 1), (2, 1), (4, 1)),
        ((0, 1), (2, 2)),
        ((0, 2), (2, 1)),
        ((2, 2), (0, 2)),
        ((1, 2), (2, 2)),
        ((1, 2), (1, 2)),
        ((3, 2), (7, 2)),  # the first run goes across a multiple of their distance
    ],
    ids=str,
)
def test_rows_that_no_draw_can_address_are_refused(runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(hal.ContractError, match="not two equal runs, which a draw could address"):
        SequenceShard(runs, 10).draw(hal.Rng(1), (4, 3), (3,), (0,))


def test_all_rows_are_taken_as_they_are() -> None:
    x = torch.arange(12).view(4, 3)
    assert SequenceShard.all_of(4) == SequenceShard(((0, 4),), 4) and SequenceShard.all_of(4).take(x, 0) is x
    assert SequenceShard(((3, 1), (0, 2)), 4).take(x, 0).tolist() == [[9, 10, 11], [0, 1, 2], [3, 4, 5]]
    assert SequenceShard(((1, 2),), 3).take(x, 1).tolist() == [[1, 2], [4, 5], [7, 8], [10, 11]]
    assert SequenceShard(((3, 1), (0, 2)), 4).positions().tolist() == [3, 0, 1]
