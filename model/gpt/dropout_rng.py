"""Where a microbatch's dropout comes from: one draw per (step, layer, place) over the whole global batch.

A microbatch takes its block of that draw, so the masks do not depend on the micro batch size, on accumulation, or on
which rank holds which part of a tensor; recomputation draws them again from the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hal import Rng

from .parallel.rows import Rows


@dataclass(frozen=True)
class Draws:
    """rng: the step's stream. The microbatch holds the samples [first_sample, ...) of a global batch of `batch`.

    rows: the positions that hidden activations have on this rank; None = all.
    """

    rng: Rng
    first_sample: int
    batch: int
    rows: Rows | None = None

    def hidden(self, name: str, layer: int, shape: Sequence[int]) -> tuple[Rng, list[int]]:
        """For an activation of `shape` [s, b, h]: the stream, and the shape as which the op must see it."""
        rows = self.rows or Rows.all_of(shape[0])
        return rows.draw(self.rng.fork(name, layer), shape, (self.batch, shape[2]), (self.first_sample, 0))

    def attention(
        self, layer: int, heads: int, first_head: int, sq: int, skv: int, starts: tuple[int, int] = (0, 0)
    ) -> Rng:
        """For probabilities [b, n, ...] of heads [first_head, ...) out of `heads`, of a whole of `sq` queries and `skv`
        keys, of which this call has those from `starts` on."""
        full = (self.batch, heads, sq, skv)
        return self.rng.fork("attention", layer).block(full, (self.first_sample, first_head, *starts))
