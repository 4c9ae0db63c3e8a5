"""What a rank holds of a tensor, in the whole tensor's coordinates: how checkpoints move between layouts.

A `LocalShard` speaks torch.distributed.checkpoint's protocol for sharded tensors, so a checkpoint written under one
layout is read under any other: names and coordinates are those of the whole model.
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

from ..parallel.tensor_sharding import Shard


@dataclass(frozen=True)
class Block:
    """A rectangle of the whole tensor, starting at `offsets`, and the view of local memory that holds it."""

    offsets: tuple[int, ...]
    view: Tensor


class LocalShard(Tensor):
    """Some blocks of a tensor of shape `full`; empty ones are dropped. A Tensor, because the protocol asks for one, but
    nothing can be computed with it: it holds places, not values."""

    blocks: list[Block]

    @staticmethod
    def __new__(cls, full: Sequence[int], blocks: Sequence[Block], dtype: torch.dtype) -> LocalShard:
        shard = Tensor._make_wrapper_subclass(cls, torch.Size(full), dtype=dtype)
        assert isinstance(shard, LocalShard)
        shard.blocks = [b for b in blocks if b.view.numel()]
        return shard

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} cannot run on a LocalShard; use its blocks")

    def copy_to(self, whole: Tensor) -> None:
        """Copies the blocks to their places in a tensor of the whole shape."""
        for b in self.blocks:
            whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.view.shape))].copy_(b.view)

    def copy_from(self, whole: Tensor) -> None:
        """Copies from a tensor of the whole shape into the blocks."""
        for b in self.blocks:
            b.view.copy_(whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.view.shape))])

    def copied(self) -> LocalShard:
        """The same places, with copies of the values in host memory."""
        copies = [Block(b.offsets, torch.empty(b.view.shape, dtype=b.view.dtype).copy_(b.view)) for b in self.blocks]
        return LocalShard(self.shape, copies, self.dtype)

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


def local_shard(
    parameter: Tensor, values: Tensor, shard: Shard | None, rank: int, size: int, replica: int
) -> LocalShard:
    """Where this rank's `values` (of the parameter, its gradient or a moment) of `parameter` lie in the whole tensor.

    shard, rank, size: how tensor-parallel ranks split the whole (None = not at all). A parameter sharded by
    fully_shard is one more split of that, by rows, of which this rank holds number `replica`.
    """
    local = list(parameter.shape)  # of the tensor-parallel part, also for a DTensor
    first_row = 0  # of `values` in that part
    if isinstance(parameter, DTensor):
        rows_per_replica = -(-local[0] // parameter.device_mesh.size())
        first_row = min(replica * rows_per_replica, local[0])
    rest = [0] * (len(local) - 1)
    if shard is None or size == 1:
        return LocalShard(local, [Block((first_row, *rest), values)], values.dtype)
    dim = shard.dim % len(local)
    full = [n * size if d == dim else n for d, n in enumerate(local)]
    # Along `dim`, the whole consists of `parts` blocks, each split over the ranks. This rank's share of a block is
    # `width` long; the shares lie side by side here, but `width * size` apart in the whole.
    width = local[dim] // shard.parts
    blocks = []
    for part in range(shard.parts):
        offset = part * width * size + rank * width
        if dim == 0:
            # Both splits are by rows: intersect this rank's share of the block with the rows that it holds.
            begin, end = max(part * width, first_row), min((part + 1) * width, first_row + len(values))
            if begin < end:
                view = values[begin - first_row : end - first_row]
                blocks.append(Block((offset + begin - part * width, *rest), view))
        else:
            offsets = [first_row, *rest]
            offsets[dim] = offset
            blocks.append(Block(tuple(offsets), values.narrow(dim, part * width, width)))
    return LocalShard(full, blocks, values.dtype)
