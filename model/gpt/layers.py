"""Linear layers and the embedding of a tensor-parallel GPT, and how their parameters come to be.

Every weight is drawn in full, on the CPU, from the seed and the parameter's name, and each rank keeps its slice: the
model starts equal whatever the parallel layout. With one rank nothing communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hal import Comm, Rng, ops

from .parallel.rows import Rows

regions = ops.regions


@dataclass(frozen=True)
class Parallel:
    """This process's place among the ranks that share a layer. The default is one process that holds everything.

    tp: ranks that share the weights. sequence: activations between the layers are split over them along the sequence.
    cp: ranks that share each sequence, by the method `cp_algorithm` (ring or ulysses).
    """

    tp: Comm | None = None
    sequence: bool = False
    cp: Comm | None = None
    cp_algorithm: str = "ring"

    @property
    def size(self) -> int:
        return 1 if self.tp is None else self.tp.size

    @property
    def rank(self) -> int:
        return 0 if self.tp is None else self.tp.rank

    def context_rows(self, full: int) -> Rows:
        """The positions of a sequence of `full` that this rank's attention has queries for."""
        if self.cp is None or self.cp.size == 1:
            return Rows.all_of(full)
        if self.cp_algorithm == "ring":
            return Rows.balanced(full, self.cp.rank, self.cp.size)
        return Rows.all_of(full).part(self.cp.rank, self.cp.size)

    def hidden_rows(self, full: int) -> Rows:
        """The positions that activations between the layers have on this rank."""
        rows = self.context_rows(full)
        return rows.part(self.rank, self.size) if self.sequence else rows

    def full_length(self, hidden: int) -> int:
        """The length of a sequence of which this rank holds `hidden` rows between the layers."""
        return hidden * (self.size if self.sequence else 1) * (1 if self.cp is None else self.cp.size)


@dataclass(frozen=True)
class Shard:
    """How a parameter is split over tensor-parallel ranks: along `dim`, separately in each of `parts` equal blocks.

    parts = 2 is for gated MLPs, whose first layer stacks two matrices: a rank holds its slice of both.
    """

    dim: int
    parts: int = 1

    def slice(self, full: Tensor, rank: int, size: int) -> Tensor:
        """This rank's part of the full parameter; a copy, since a view would keep the whole alive."""
        if size == 1:
            return full
        pieces = [block.chunk(size, self.dim)[rank] for block in full.chunk(self.parts, self.dim)]
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces, self.dim)


@dataclass
class Init:
    """Makes parameters. `shards` records, by parameter name, how each is split (absent = every rank holds it all)."""

    seed: int
    dtype: torch.dtype
    device: torch.device
    parallel: Parallel = Parallel()
    shards: dict[str, Shard] = field(default_factory=dict)

    def weight(self, name: str, full_shape: Sequence[int], std: float, shard: Shard | None = None) -> nn.Parameter:
        """Normal with standard deviation `std`, a function of the seed, the name and the full shape only."""
        generator = torch.Generator().manual_seed(Rng(self.seed).fork("init", name).seed)
        return self._place(name, torch.empty(*full_shape).normal_(0.0, std, generator=generator), shard)

    def constant(self, name: str, full_shape: Sequence[int], value: float, shard: Shard | None = None) -> nn.Parameter:
        """Every element `value`."""
        return self._place(name, torch.full(tuple(full_shape), value), shard)

    def _place(self, name: str, full: Tensor, shard: Shard | None) -> nn.Parameter:
        if shard is not None:
            self.shards[name] = shard
            full = shard.slice(full, self.parallel.rank, self.parallel.size)
        return nn.Parameter(full.to(device=self.device, dtype=self.dtype).contiguous())


class ColumnParallelLinear(nn.Module):
    """x [..., in] -> [..., out / ranks]; the weight's rows are split over the ranks.

    fused_bias: the bias is not added here; whoever calls passes `self.bias` to the op that follows.
    """

    def __init__(
        self,
        init: Init,
        name: str,
        n_in: int,
        n_out: int,
        *,
        std: float,
        bias: bool,
        fused_bias: bool = False,
        parts: int = 1,
    ) -> None:
        super().__init__()
        self.parallel, self.fused_bias, shard = init.parallel, fused_bias, Shard(0, parts)
        self.weight = init.weight(f"{name}.weight", (n_out, n_in), std, shard)
        self.bias = init.constant(f"{name}.bias", (n_out,), 0.0, shard) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, None if self.fused_bias else self.bias, self.parallel)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel) -> Tensor:
    """The product of a column-parallel layer: enters the tensor-parallel region."""
    if parallel.sequence and parallel.tp is not None and parallel.tp.size > 1:
        return _GatheredLinear.apply(x, weight, bias, parallel.tp)
    return linear(regions.copy_to_region(x, parallel.tp), weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """ops.linear, of whose parameters those gradients that have a float32 sum already (`main_grad`, as Megatron names
    it; set by the optimizer from the second microbatch on) are added to it by the product itself."""
    sums = _sums(weight, bias)
    return ops.linear(x, weight, bias) if sums is None else _SummedLinear.apply(x, weight, bias, sums)


_Sums = tuple[Tensor, Tensor | None]


def _sums(weight: Tensor, bias: Tensor | None) -> _Sums | None:
    """What the gradients of a layer's parameters are added to, if there is such a sum of every one of them."""
    found = [getattr(p, "main_grad", None) for p in (weight, bias) if p is not None]
    return None if any(s is None for s in found) else (found[0], None if bias is None else found[1])


class _SummedLinear(torch.autograd.Function):
    """ops.linear whose weight and bias get no gradient: it is in their sums when the backward pass is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sums: _Sums) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        return ops.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = ops.linear(dy, weight.t()) if ctx.needs_input_grad[0] else None
        ops.linear_wgrad(x, dy, *ctx.sums)
        return dx, None, None, None


class _GatheredLinear(torch.autograd.Function):
    """linear(all_gather(x), weight, bias) that keeps this rank's rows for the backward pass, not all of them.

    They are gathered a second time, while the gradient of x is computed (Korthikanti et al., arXiv 2205.05198, section
    4.2.2: what a layer keeps is then divided by the ranks throughout).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: Comm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.has_bias, ctx.sums = comm, bias is not None, _sums(weight, bias)
        return ops.linear(comm.all_gather(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gathering = ctx.comm.start("all_gather", x)
        scattering = ctx.comm.start("reduce_scatter", ops.linear(dy, weight.t()))
        dy_rows, x_rows = dy.flatten(0, -2), gathering.wait().flatten(0, -2)
        if ctx.sums is not None:
            ops.linear_wgrad(x_rows, dy_rows, *ctx.sums)
            return scattering.wait(), None, None, None
        dw = ops.linear(dy_rows.t(), x_rows.t())
        return scattering.wait(), dw, dy_rows.sum(0) if ctx.has_bias else None, None


class RowParallelLinear(nn.Module):
    """x [..., in / ranks] -> [..., out]; the weight's columns are split, the products summed over the ranks.

    The bias (`self.bias`, which every rank holds) is never added here: it is fused with the dropout that follows.
    """

    def __init__(self, init: Init, name: str, n_in: int, n_out: int, *, std: float, bias: bool) -> None:
        super().__init__()
        self.parallel = init.parallel
        self.weight = init.weight(f"{name}.weight", (n_out, n_in), std, Shard(1))
        self.bias = init.constant(f"{name}.bias", (n_out,), 0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        leave = regions.reduce_scatter_from_region if self.parallel.sequence else regions.reduce_from_region
        return leave(linear(x, self.weight), self.parallel.tp)


class VocabParallelEmbedding(nn.Module):
    """ids [s, ...] -> [s, ..., hidden] (this rank's rows of it with sequence parallelism); the table's rows
    (vocabulary) are split over the ranks."""

    def __init__(self, init: Init, name: str, vocabulary: int, hidden: int, *, std: float) -> None:
        super().__init__()
        self.parallel = init.parallel
        self.weight = init.weight(f"{name}.weight", (vocabulary, hidden), std, Shard(0))

    def forward(self, ids: Tensor) -> Tensor:
        start = self.parallel.rank * self.weight.shape[0]
        x = ops.embedding(self.weight, ids, vocab_start=start, comm=self.parallel.tp)
        return regions.scatter_to_region(x, self.parallel.tp, 0) if self.parallel.sequence else x


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension; gamma starts at `scale`."""

    def __init__(self, init: Init, name: str, hidden: int, *, kind: str, eps: float, scale: float = 1.0) -> None:
        super().__init__()
        self.eps = eps
        self.weight = init.constant(f"{name}.weight", (hidden,), scale)
        self.bias = init.constant(f"{name}.bias", (hidden,), 0.0) if kind == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return ops.rms_norm(x, self.weight, self.eps)
        return ops.layer_norm(x, self.weight, self.bias, self.eps)
