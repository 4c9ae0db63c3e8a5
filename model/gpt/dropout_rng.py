"""The random numbers of a microbatch's dropout: one draw per (step, layer, dropout) over the entire global batch.

A microbatch takes its block of that draw, so the masks do not depend on the micro batch size, on accumulation, or on
which rank holds which part of a tensor. Recomputation draws them again from the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hal import Rng

from ..parallel.sequence_shard import SequenceShard


@dataclass(frozen=True)
class DropoutRng:
    """rng: the step's stream. The microbatch starts at `first_sample` of a global batch of `batch` samples.

    rows: the sequence positions of this rank's hidden activations; None = all.
    """

    rng: Rng
    first_sample: int
    batch: int
    rows: SequenceShard | None = None

    def hidden(self, name: str, layer: int, shape: Sequence[int]) -> tuple[Rng, list[int]]:
        """(stream, block shape) for an activation of `shape` [s, b, h]; the op must get a view of the block shape."""
        rows = self.rows or SequenceShard.all_of(shape[0])
        return rows.draw(self.rng.fork(name, layer), shape, (self.batch, shape[2]), (self.first_sample, 0))

    def attention(
        self, layer: int, heads: int, first_head: int, sq: int, skv: int, starts: tuple[int, int] = (0, 0)
    ) -> Rng:
        """The stream of attention probabilities [b, n, sq, skv] of the heads from `first_head` on, out of `heads`.

        starts: the first query and key of the call, if it computes only a block of the `sq` queries and `skv` keys.
        """
        full = (self.batch, heads, sq, skv)
        return self.rng.fork("attention", layer).block(full, (self.first_sample, first_head, *starts))
