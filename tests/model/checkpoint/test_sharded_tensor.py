"""Local shards cover the whole tensor exactly once in every layout, and loading returns what was saved."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from hal.model.checkpoint import sharded_tensor
from hal.model.checkpoint.sharded_tensor import local_shard
from hal.model.parallel.tensor_sharding import Shard


@given(
    tp=st.integers(1, 3),
    replicas=st.integers(1, 4),
    parts=st.sampled_from([1, 2]),
    dim=st.sampled_from([None, 0, 1]),
    rows=st.integers(1, 3),
)
def test_every_element_is_in_one_piece(tp: int, replicas: int, parts: int, dim: int | None, rows: int) -> None:
    shape = [rows, 5]
    if dim is not None:
        shape[dim] = 2 * tp * rows
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    shard = None if dim is None else Shard(dim, parts if dim == 0 else 1)
    counts, again = torch.zeros(shape, dtype=torch.int64), torch.zeros_like(whole)
    for rank in range(tp if shard else 1):
        part = whole if shard is None else shard.slice(whole, rank, tp)
        per = -(-part.shape[0] // replicas)
        for replica in range(replicas):
            values = part[replica * per : (replica + 1) * per].clone()
            mine = _local_shard(part, values, shard, rank, tp, replica, replicas)
            assert tuple(mine.size()) == tuple(shape)
            mine.copy_to(again)
            for block in mine.blocks:
                counts[tuple(slice(o, o + n) for o, n in zip(block.offsets, block.view.shape))] += 1
    assert torch.equal(again, whole) and bool((counts == 1).all())


def _local_shard(part, values, shard, rank, tp, replica, replicas):
    if replicas == 1:
        return local_shard(part, values, shard, rank, tp, 0)

    class Mesh:
        @staticmethod
        def size() -> int:
            return replicas

    class Row(torch.Tensor):
        device_mesh = Mesh

    before, sharded_tensor.DTensor = sharded_tensor.DTensor, Row
    try:
        return local_shard(part.as_subclass(Row), values, shard, rank, tp, replica)
    finally:
        sharded_tensor.DTensor = before
        assert sharded_tensor.DTensor is DTensor
