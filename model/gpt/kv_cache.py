"""The key/value cache of a stage's layers for incremental decoding.

With it, a forward pass over the next tokens gives the same logits as a forward pass over all tokens. For devices that
compile every shape, lengths are rounded up to powers of two, so that n tokens are generated with O(log n) shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import ContractError

from ..config.rotary import rotation
from ..config.schema import Config
from ..parallel.tensor_sharding import Parallel

SHORTEST = 64
"""The least number of keys that attention over a bucketed cache reads; shorter buckets would save little time."""


def bucket(count: int, least: int, limit: int) -> int:
    """The smallest power of two that is at least `count` and `least`, but at most max(count, limit)."""
    return max(count, min(limit, 1 << (max(count, least) - 1).bit_length()))


class KeyValueCache:
    """Memory for `capacity` tokens of `batch` sequences, of which `length` are filled. One per stage and batch.

    Every sequence of the batch has the same length: the positions of a forward pass are [length, length + s).

    bucketed: attention reads a number of keys that is a power of two (or the model's longest sequence), and a mask
    hides those that are not filled. `capacity` is rounded up accordingly.
    """

    def __init__(
        self,
        config: Config,
        layers: Sequence[int],
        batch: int,
        capacity: int,
        parallel: Parallel,
        device: torch.device,
        *,
        bucketed: bool = False,
    ) -> None:
        if parallel.sequence or parallel.cp.size > 1:
            raise ContractError(
                "the key-value cache holds whole sequences: generate without --sequence-parallel and with "
                "--context-parallel-size 1 (a checkpoint of any layout loads under any other)"
            )
        self.bucketed, self._longest = bucketed, config.seq_length
        self.capacity, self.length = bucket(capacity, SHORTEST, self._longest) if bucketed else capacity, 0
        heads = {n: config.cached_heads(n, parallel.tp.size) for n in layers}
        # Zeros, because a hidden value has the weight 0, and 0 times the NaN that fresh memory may hold is NaN.
        self.tensors = {
            n: [torch.zeros(self.capacity, batch, *x, dtype=config.params_dtype, device=device) for x in heads[n]]
            for n in layers
        }
        self._device = device
        self._hidden: dict[tuple[Any, ...], Tensor] = {}
        self._angles = rotation(config, self.capacity, device, longest=capacity) if config.rotates else None

    def append(self, layer: int, *new: Tensor) -> list[Tensor]:
        """Stores keys and values (or latents) [s, b, g, d] of the next s tokens; returns all, [length + s, b, g, d].

        If `hidden` has a mask for these tokens, the result has one row per column of it.
        """
        end = self.length + new[0].shape[0]
        for stored, x in zip(self.tensors[layer], new, strict=True):
            stored[self.length : end] = x
        end = self._rows(end)
        return [stored[:end] for stored in self.tensors[layer]]

    def hidden(self, count: int, window: tuple[int | None, int]) -> Tensor | None:
        """Which keys each of the next `count` tokens does not see with the layer's `window`, bool [1, 1, count, keys],
        for attention without a window; None if the window says it for the tokens that `append` returns."""
        key = self.length, count, window
        if not self.bucketed or self.length == 0:  # the tokens of a first pass are all keys there are
            return None
        if key not in self._hidden:  # the same for all layers of a window
            end, (pre, next_) = self.length + count, window
            position, keys = torch.arange(self.length, end)[:, None], torch.arange(self._rows(end))
            hidden = keys > position + next_
            if pre is not None:
                hidden |= keys < position - pre
            self._hidden = {k: mask for k, mask in self._hidden.items() if k[:2] == key[:2]}
            self._hidden[key] = hidden[None, None].to(self._device)
        return self._hidden[key]

    def _rows(self, end: int) -> int:
        """The number of rows that attention reads when the first `end` are filled."""
        return bucket(end, SHORTEST, self._longest) if self.bucketed and self.length else end

    def rotary_cos_sin(self, count: int) -> tuple[Tensor, Tensor] | None:
        """The rotary angles of the next `count` positions, if the model has rotary positions."""
        if self._angles is None:
            return None
        cos, sin = self._angles
        return cos[self.length : self.length + count], sin[self.length : self.length + count]

    def advance(self, count: int) -> None:
        """Called when all layers have stored `count` more tokens."""
        self.length += count

    @property
    def free(self) -> int:
        """The number of tokens that can still be stored."""
        return self.capacity - self.length

    def discard(self, count: int) -> None:
        """Forgets the last `count` tokens, which only completed a bucket."""
        self.length -= count
