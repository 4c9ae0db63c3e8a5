"""Where a microbatch's dropout comes from: one draw per (step, layer, place) over the whole global batch.

A microbatch takes its block of that draw, so the masks do not depend on the micro batch size, on accumulation, or on
which rank holds which part of a tensor; recomputation draws them again from the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hal import Rng


@dataclass(frozen=True)
class Draws:
    """rng: the step's stream. The microbatch holds the samples [first_sample, ...) of a global batch of `batch`."""

    rng: Rng
    first_sample: int
    batch: int

    def hidden(
        self, name: str, layer: int, shape: Sequence[int], *, seq_start: int = 0, seq_full: int | None = None
    ) -> Rng:
        """For an activation of `shape` [s, b, h] that starts at position seq_start of a sequence of seq_full."""
        s, _, h = shape
        full = (s if seq_full is None else seq_full, self.batch, h)
        return self.rng.fork(name, layer).block(full, (seq_start, self.first_sample, 0))

    def attention(self, layer: int, heads: int, first_head: int, sq: int, skv: int) -> Rng:
        """For probabilities [b, n, sq, skv] of heads [first_head, ...) out of `heads`."""
        full = (self.batch, heads, sq, skv)
        return self.rng.fork("attention", layer).block(full, (self.first_sample, first_head, 0, 0))
