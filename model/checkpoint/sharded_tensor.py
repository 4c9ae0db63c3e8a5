"""What a rank holds of a tensor, in the whole tensor's coordinates: how checkpoints move between layouts.

A `Piece` speaks torch.distributed.checkpoint's protocol for sharded tensors, so a checkpoint written under one layout
is read under any other: names and coordinates are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..layers import Shard


@dataclass(frozen=True)
class Block:
    """A rectangle of the whole tensor, starting at `offsets`, and the view of local memory that holds it."""

    offsets: tuple[int, ...]
    view: Tensor


class Piece(Tensor):
    """Some blocks of a tensor of shape `full`. A Tensor, because the protocol asks for one, but nothing can be computed
    with it: it holds places, not values."""

    blocks: list[Block]

    @staticmethod
    def __new__(cls, full: Sequence[int], blocks: Sequence[Block], dtype: torch.dtype) -> Piece:
        made: Piece = Tensor._make_wrapper_subclass(cls, torch.Size(full), dtype=dtype)  # type: ignore[attr-defined]
        made.blocks = [b for b in blocks if b.view.numel()]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} cannot run on a Piece; use its blocks")

    def fill(self, whole: Tensor) -> None:
        """Copies the blocks to their places in a tensor of the whole shape."""
        for b in self.blocks:
            whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.view.shape))].copy_(b.view)

    def take(self, whole: Tensor) -> None:
        """Copies from a tensor of the whole shape into the blocks."""
        for b in self.blocks:
            b.view.copy_(whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.view.shape))])

    def copied(self) -> Piece:
        """The same places, with copies of the values in host memory."""
        copies = [Block(b.offsets, torch.empty(b.view.shape, dtype=b.view.dtype).copy_(b.view)) for b in self.blocks]
        return Piece(self.shape, copies, self.dtype)

    # torch.distributed.checkpoint's protocol.

    def _chunk(self, block: Block) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(block.offsets), block.view.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(b) for b in self.blocks]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, b.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk(b), properties=TensorProperties.create_from_tensor(b.view), size=self.shape
                ),
            )
            for b in self.blocks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return next(b.view for b in self.blocks if tuple(b.offsets) == tuple(index.offset))


def piece(parameter: Tensor, held: Tensor, shard: Shard | None, rank: int, size: int, replica: int) -> Piece:
    """The piece that `held` is: this rank's values (of the parameter, its gradient or a moment) of `parameter`.

    shard, rank, size: how tensor-parallel ranks split the whole (None = not at all). A parameter sharded by
    fully_shard is one more split of that, by rows, of which this rank holds number `replica`.
    """
    local = list(parameter.shape)  # of the tensor-parallel part, also for a DTensor
    first_row = 0
    if isinstance(parameter, DTensor):
        per_rank = -(-local[0] // parameter.device_mesh.size())
        first_row = min(replica * per_rank, local[0])
    if shard is None or size == 1:
        return Piece(local, [Block((first_row, *[0] * (len(local) - 1)), held)], held.dtype)
    dim, parts = shard.dim % len(local), shard.parts
    full = [n * size if d == dim else n for d, n in enumerate(local)]
    width, stride = local[dim] // parts, full[dim] // parts
    blocks = []
    for part in range(parts):
        # Rows [low, high) of the tensor-parallel part are local; intersect them with this part's.
        low, high = (part * width, (part + 1) * width) if dim == 0 else (0, local[0])
        a, b = max(low, first_row), min(high, first_row + held.shape[0])
        if a >= b:
            continue
        view = held.narrow(0, a - first_row, b - a)
        offsets = [0] * len(local)
        offsets[0] = a
        if dim == 0:
            offsets[0] = a - low + part * stride + rank * width
        else:
            view = view.narrow(dim, part * width, width)
            offsets[dim] = part * stride + rank * width
        blocks.append(Block(tuple(offsets), view))
    return Piece(full, blocks, held.dtype)
