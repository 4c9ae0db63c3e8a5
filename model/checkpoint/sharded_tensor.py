"""Shards of tensors in the coordinates of the full tensor, which make checkpoints independent of the layout.

A `LocalShard` implements torch.distributed.checkpoint's protocol for sharded tensors. Names and coordinates are those
of the full model, so a checkpoint written under one layout can be read under any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from ..parallel.tensor_sharding import Parallel, Shard


@dataclass(frozen=True)
class Block:
    """A rectangular block of the full tensor, starting at `offsets`, and the view of local memory that contains it."""

    offsets: tuple[int, ...]
    view: Tensor


class LocalShard(Tensor):
    """Blocks of a tensor of shape `full`; empty blocks are dropped. It is a Tensor because the protocol requires one,
    but it does not support any computation."""

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
        """Copies the blocks to their positions in a tensor of the full shape."""
        for b in self.blocks:
            whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.view.shape))].copy_(b.view)

    def copied(self) -> LocalShard:
        """The same shard with copies of the blocks in host memory."""
        copies = [Block(b.offsets, torch.empty(b.view.shape, dtype=b.view.dtype).copy_(b.view)) for b in self.blocks]
        return LocalShard(self.shape, copies, self.dtype)

    # The protocol of torch.distributed.checkpoint.

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


class DeferredTensor(LocalShard):
    """A full tensor that is computed when the checkpoint's file is written, and not kept. meta: it without data."""

    load: Callable[[], Tensor]

    @staticmethod
    def of(meta: Tensor, load: Callable[[], Tensor]) -> DeferredTensor:
        """The tensor that `load` returns, of the shape and dtype of `meta`."""
        shard = LocalShard.__new__(DeferredTensor, meta.shape, [Block((0,) * meta.dim(), meta)], meta.dtype)
        assert isinstance(shard, DeferredTensor)
        shard.load = load
        return shard

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.load().contiguous()


def shard_of_rank(
    parameter: Tensor, values: Tensor, shard: Shard | None, parallel: Parallel, replica: int, expert_replica: int = 0
) -> LocalShard:
    """`local_shard` for this rank's coordinates. replica, expert_replica: its numbers among the ranks that hold the
    same part of a dense parameter, and of experts."""
    if shard is None or not shard.experts:
        return local_shard(parameter, values, shard, parallel.tp.rank, parallel.tp.size, replica)
    experts = parallel.ep.rank, parallel.ep.size
    return local_shard(parameter, values, shard, parallel.etp.rank, parallel.etp.size, expert_replica, experts)


def local_shard(
    parameter: Tensor,
    values: Tensor,
    shard: Shard | None,
    rank: int,
    size: int,
    replica: int,
    experts: tuple[int, int] = (0, 1),
) -> LocalShard:
    """The shard for `values` (the parameter, its gradient or a moment) that this rank has of `parameter`.

    shard, rank, size: how tensor-parallel ranks split the full tensor (None = not at all). experts: (rank, size) of the
    ranks that split dimension 0 of a parameter of experts. fully_shard splits each of these parts further by rows; this
    rank has part number `replica`.
    """
    local = list(parameter.shape)  # the shape of the tensor-parallel part, also for a DTensor
    first_row = 0  # the first row of `values` in that part
    if isinstance(parameter, DTensor):
        rows_per_replica = -(-local[0] // parameter.device_mesh.size())
        first_row = min(replica * rows_per_replica, local[0])
    rest = [0] * (len(local) - 1)
    # Experts are stacked along dimension 0: this rank has `count` of `count * experts[1]`.
    count = local[0]
    local[0] = count * experts[1]
    first_row += experts[0] * count
    if shard is None or size == 1:
        return LocalShard(local, [Block((first_row, *rest), values)], values.dtype)
    dim = shard.dim % len(local)
    full = [n * size if d == dim else n for d, n in enumerate(local)]
    # Along `dim`, the full tensor consists of `parts` blocks, each split over the ranks. This rank's share of a block
    # has length `width`. The shares are adjacent in local memory, but `width * size` apart in the full tensor.
    width = local[dim] // shard.parts
    blocks = []
    for part in range(shard.parts):
        offset = part * width * size + rank * width
        if dim == 0:
            # Both splits are by rows: intersect this rank's share of the block with the rows of its shard.
            begin, end = max(part * width, first_row), min((part + 1) * width, first_row + len(values))
            if begin < end:
                view = values[begin - first_row : end - first_row]
                blocks.append(Block((offset + begin - part * width, *rest), view))
        else:
            offsets = [first_row, *rest]
            offsets[dim] = offset
            blocks.append(Block(tuple(offsets), values.narrow(dim, part * width, width)))
    return LocalShard(full, blocks, values.dtype)
