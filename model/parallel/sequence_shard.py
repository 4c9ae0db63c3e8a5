"""The positions of a sequence that a rank holds when context- or sequence-parallel ranks split the sequence.

There are at most two runs, of equal length, so that a rank can address its part of a random draw over the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal import ContractError, Rng


@dataclass(frozen=True)
class SequenceShard:
    """`runs` of (first position, length) out of `full` positions, in the order in which they are stored on the rank.

    These positions are called rows, and are numbered from 0 in that order.
    """

    runs: tuple[tuple[int, int], ...]
    full: int

    @staticmethod
    def all_of(full: int) -> SequenceShard:
        """Every position."""
        return SequenceShard(((0, full),), full)

    @staticmethod
    def zigzag(full: int, rank: int, size: int) -> SequenceShard:
        """Chunks `rank` and `2*size-1-rank` of 2*size: with causal attention every rank has the same work."""
        if size == 1:
            return SequenceShard.all_of(full)
        if full % (2 * size):
            raise ContractError(f"a sequence of {full} cannot be cut into 2 x {size} chunks for context parallelism")
        c = full // (2 * size)
        return SequenceShard(((rank * c, c), ((2 * size - 1 - rank) * c, c)), full)

    def part(self, rank: int, size: int) -> SequenceShard:
        """The `rank`-th of `size` equal consecutive parts of these rows."""
        if self.count % size:
            raise ContractError(f"{size} ranks cannot divide {self.count} rows of the sequence")
        length = self.count // size
        begin, end = rank * length, (rank + 1) * length  # the part, in rows
        runs, first_row = [], 0
        for position, count in self.runs:
            # The intersection of the part with this run, counted from the run's beginning.
            low, high = max(begin - first_row, 0), min(end - first_row, count)
            if low < high:
                runs.append((position + low, high - low))
            first_row += count
        return SequenceShard(tuple(runs), self.full)

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(length for _, length in self.runs)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """The positions, int64 [count]."""
        return torch.cat([torch.arange(first, first + n, device=device) for first, n in self.runs])

    def take(self, x: Tensor, dim: int) -> Tensor:
        """These rows of `x`, which has all positions along `dim`."""
        if self.count == self.full:
            return x
        return torch.cat([x.narrow(dim, first, n) for first, n in self.runs], dim)

    def draw(self, rng: Rng, shape: Sequence[int], rest: Sequence[int], start: Sequence[int]) -> tuple[Rng, list[int]]:
        """(stream, block shape) with which these rows get their numbers of one draw of [full, *rest].

        shape: this rank's [count, ...], which starts at `start` in the dimensions after the first. An op that draws for
        a tensor of `shape` must get a view of the block shape, which has the same elements in the same order.
        """
        (first, length), *others = self.runs
        if not others:
            return rng.block((self.full, *rest), (first, *start)), list(shape)
        # An Rng addresses one rectangular block of a draw, which two runs of positions are not. They become one if
        # position p is written as (p // distance, p % distance), where `distance` is the distance of the runs' first
        # positions: then the second run is directly below the first, in the same columns. The numbers do not change,
        # because a draw is numbered in row-major order, which splitting a dimension preserves.
        distance = others[0][0] - first
        if len(others) > 1 or others[0][1] != length or distance < length or first % distance + length > distance:
            raise ContractError(f"rows {self.runs} of {self.full} are not two equal runs, which a draw could address")
        row, column = divmod(first, distance)
        return rng.block((row + 2, distance, *rest), (row, column, *start)), [2, length, *shape[1:]]
