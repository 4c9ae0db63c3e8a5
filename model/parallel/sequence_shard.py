"""Which rows (positions of the sequence) a rank holds when context- or sequence-parallel ranks split the sequence.

At most two runs of equal length, so that a random draw over the whole sequence can be addressed from a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal import ContractError, Rng


@dataclass(frozen=True)
class Rows:
    """`runs` of (first position, length), in the order in which the rank holds them, out of `full` positions."""

    runs: tuple[tuple[int, int], ...]
    full: int

    @staticmethod
    def all_of(full: int) -> Rows:
        """Every row."""
        return Rows(((0, full),), full)

    @staticmethod
    def balanced(full: int, rank: int, size: int) -> Rows:
        """Chunks `rank` and `2*size-1-rank` of 2*size: with causal attention every rank has the same work."""
        if full % (2 * size):
            raise ContractError(f"a sequence of {full} cannot be cut into 2 x {size} chunks for context parallelism")
        c = full // (2 * size)
        return Rows(((rank * c, c), ((2 * size - 1 - rank) * c, c)), full)

    def part(self, rank: int, size: int) -> Rows:
        """The `rank`-th of `size` equal consecutive parts of these rows."""
        if self.count % size:
            raise ContractError(f"{size} ranks cannot divide {self.count} rows of the sequence")
        n = self.count // size
        left, right, runs, before = rank * n, (rank + 1) * n, [], 0
        for first, length in self.runs:
            a, b = max(left, before), min(right, before + length)
            if a < b:
                runs.append((first + a - before, b - a))
            before += length
        return Rows(tuple(runs), self.full)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(length for _, length in self.runs)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """The positions, int64 [count]."""
        return torch.cat([torch.arange(first, first + n, device=device) for first, n in self.runs])

    def take(self, x: Tensor, dim: int) -> Tensor:
        """These rows of `x`, which has all of them along `dim`."""
        if self.count == self.full:
            return x
        return torch.cat([x.narrow(dim, first, n) for first, n in self.runs], dim)

    def draw(self, rng: Rng, shape: Sequence[int], rest: Sequence[int], start: Sequence[int]) -> tuple[Rng, list[int]]:
        """(rng, seen): the numbers these rows have in one draw of [full, *rest].

        shape: this rank's [count, ...], which starts at `start` in the dimensions after the first. An op that draws
        for a tensor of `shape` must see it as one of shape `seen`, which has the same elements in the same order.
        """
        (first, length), *others = self.runs
        if not others:
            return rng.block((self.full, *rest), (first, *start)), list(shape)
        # Two runs a distance apart are a draw with that distance as its second dimension.
        distance = others[0][0] - first
        if len(others) > 1 or others[0][1] != length or distance < length or first % distance + length > distance:
            raise ContractError(f"rows {self.runs} of {self.full} are no two equal runs that a draw could address")
        whole = (first // distance + 2, distance, *rest)
        return rng.block(whole, (first // distance, first % distance, *start)), [2, length, *shape[1:]]
