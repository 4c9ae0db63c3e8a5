"""The key/value cache of a stage's layers for incremental decoding.

With it, a forward pass over the next tokens gives the same logits as a forward pass over all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import ContractError

from ..config.schema import Config
from ..parallel.tensor_sharding import Parallel
from .attention import rotation


class KeyValueCache:
    """Memory for `capacity` tokens of `batch` sequences, of which `length` are filled. One per stage and batch.

    Every sequence of the batch has the same length: the positions of a forward pass are [length, length + s).
    """

    def __init__(
        self,
        config: Config,
        layers: Sequence[int],
        batch: int,
        capacity: int,
        parallel: Parallel,
        device: torch.device,
    ) -> None:
        if parallel.sequence or parallel.cp.size > 1:
            raise ContractError(
                "the key-value cache holds whole sequences: generate without --sequence-parallel and with "
                "--context-parallel-size 1 (a checkpoint of any layout loads under any other)"
            )
        shape = (capacity, batch, config.num_query_groups // parallel.tp.size, config.kv_channels)
        self.capacity, self.length = capacity, 0
        self._kv = {
            n: tuple(torch.empty(shape, dtype=config.params_dtype, device=device) for _ in range(2)) for n in layers
        }
        self._angles = rotation(config, capacity, device) if config.position_embedding_type == "rope" else None

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [s, b, g, d] of the next s tokens; returns all so far, [length + s, b, g, d]."""
        end = self.length + k.shape[0]
        keys, values = self._kv[layer]
        keys[self.length : end], values[self.length : end] = k, v
        return keys[:end], values[:end]

    def rotary_cos_sin(self, count: int) -> tuple[Tensor, Tensor] | None:
        """The rotary angles of the next `count` positions, if the model has rotary positions."""
        if self._angles is None:
            return None
        cos, sin = self._angles
        return cos[self.length : self.length + count], sin[self.length : self.length + count]

    def advance(self, count: int) -> None:
        """Called when all layers have stored `count` more tokens."""
        self.length += count
