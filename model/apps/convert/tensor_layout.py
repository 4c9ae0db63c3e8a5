"""How one tensor of HAL corresponds to one or several tensors of a Hugging Face model: the order of rows, and back.

Every layout maps a list of their tensors to one of ours (`join`) and back (`split`), and is exact: only rows move. All
of them work on tensors without data (the device meta), so that shapes are known before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...config.schema import Config
from .qkv_layout import group_qkv, pairs_to_halves, ungroup_qkv


@dataclass(frozen=True)
class Layout:
    """The same tensor under another name. names: their modules; `{e}` in a name stands for the number of an expert."""

    names: tuple[str, ...]

    def join(self, parts: Sequence[Tensor], c: Config) -> Tensor:
        """Our tensor, from theirs in the order of `names`."""
        (tensor,) = parts
        return tensor

    def split(self, tensor: Tensor, c: Config) -> list[Tensor]:
        """Their tensors in the order of `names`, from ours."""
        return [tensor]

    def count(self, c: Config) -> int:
        """The number of experts that `{e}` counts."""
        return 1


class Transposed(Layout):
    """A weight stored as [in, out] (GPT-2's Conv1D); a bias [out] is the same."""

    def join(self, parts: Sequence[Tensor], c: Config) -> Tensor:
        return parts[0].t()

    def split(self, tensor: Tensor, c: Config) -> list[Tensor]:
        return [tensor.t()]


class Qkv(Layout):
    """Queries, keys and values as three tensors."""

    def join(self, parts: Sequence[Tensor], c: Config) -> Tensor:
        q, k, v = parts
        return group_qkv(q, k, v, c.num_query_groups)

    def split(self, tensor: Tensor, c: Config) -> list[Tensor]:
        q, k, v = ungroup_qkv(tensor, c.num_query_groups, c.kv_channels)
        if c.rotary_interleaved:
            q, k = pairs_to_halves(q, c.kv_channels), pairs_to_halves(k, c.kv_channels)
        return [q, k, v]


class StackedQkv(Qkv):
    """One tensor: the rows of all queries, of all keys, and of all values (Phi-3)."""

    def join(self, parts: Sequence[Tensor], c: Config) -> Tensor:
        sizes = [n * c.kv_channels for n in (c.num_attention_heads, c.num_query_groups, c.num_query_groups)]
        return super().join(torch.split(parts[0], sizes), c)

    def split(self, tensor: Tensor, c: Config) -> list[Tensor]:
        return [torch.cat(super().split(tensor, c))]


class TransposedQkv(StackedQkv):
    """The same as [in, out] (GPT-2)."""

    def join(self, parts: Sequence[Tensor], c: Config) -> Tensor:
        return super().join([parts[0].t()], c)

    def split(self, tensor: Tensor, c: Config) -> list[Tensor]:
        return [super().split(tensor, c)[0].t()]


class GateUp(Layout):
    """The two halves of a gated MLP's first layer as two tensors."""

    def join(self, parts: Sequence[Tensor], c: Config) -> Tensor:
        return torch.cat(list(parts))

    def split(self, tensor: Tensor, c: Config) -> list[Tensor]:
        return list(tensor.chunk(2))


class Experts(Layout):
    """The experts of a layer as one or two (gate and up) tensors each."""

    def join(self, parts: Sequence[Tensor], c: Config) -> Tensor:
        width = len(self.names)
        return torch.stack([torch.cat(list(parts[n : n + width])) for n in range(0, len(parts), width)])

    def split(self, tensor: Tensor, c: Config) -> list[Tensor]:
        return [part for expert in tensor for part in expert.chunk(len(self.names))]

    def count(self, c: Config) -> int:
        return c.expert_count
