"""Splitting of weights and activations over the ranks that share a layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hal import Comm, SingleRankComm, ops
from hal.mesh import Mesh

from ..config.schema import Config
from .sequence_shard import SequenceShard

mappings = ops.mappings


@dataclass(frozen=True)
class Parallel:
    """This process's coordinates among the ranks that share a layer. The default is a single process.

    tp: ranks that share the weights. sequence: activations between the layers are split over them along the sequence.
    overlap: products and the communication that sequence parallelism adds to them are one op, which a backend overlaps.
    cp: ranks that share each sequence. ring: those of them among which keys and values go round; ulysses: those that
    exchange their parts of the sequence for parts of the heads, together one rank's part of the ring.

    For mixtures of experts: experts: ranks that share the experts of a layer, of which `ep` hold different experts and
    `etp` shards of the same. microbatch: ranks with different tokens of a micro-batch. replicas: ranks with different
    micro-batches.
    """

    tp: Comm = field(default_factory=SingleRankComm)
    sequence: bool = False
    overlap: bool = False
    cp: Comm = field(default_factory=SingleRankComm)
    ring: Comm = field(default_factory=SingleRankComm)
    ulysses: Comm = field(default_factory=SingleRankComm)
    experts: Comm = field(default_factory=SingleRankComm)
    ep: Comm = field(default_factory=SingleRankComm)
    etp: Comm = field(default_factory=SingleRankComm)
    microbatch: Comm = field(default_factory=SingleRankComm)
    replicas: Comm = field(default_factory=SingleRankComm)

    @staticmethod
    def of(mesh: Mesh, config: Config) -> Parallel:
        """The coordinates of this rank in `mesh`; sequences are split by the methods that the config chooses."""
        tp, cp = mesh.comm("tp"), mesh.comm("cp")
        ranks, degree = tuple(mesh.layout.group(mesh.rank, "cp")), config.ulysses_degree
        first = cp.rank - cp.rank % degree
        ring, ulysses = mesh.comm_of(ranks[cp.rank % degree :: degree]), mesh.comm_of(ranks[first : first + degree])
        parallel = Parallel(tp, config.sequence_parallel, config.tp_comm_overlap, cp, ring, ulysses)
        if config.num_experts is None:
            return parallel
        return replace(
            parallel,
            experts=mesh.comm("etp", "ep"),
            ep=mesh.comm("ep"),
            etp=mesh.comm("etp"),
            microbatch=mesh.comm("tp", "cp") if config.sequence_parallel else parallel.cp,
            replicas=mesh.comm("dp"),
        )

    def enter_region(self, x: Tensor) -> Tensor:
        """Activations between the layers, [s, ...], as each tensor-parallel rank's shard of a weight reads them: with
        sequence parallelism gathered from this rank's [s / ranks, ...]. The gradient is the sum of the ranks'."""
        enter = mappings.all_gather_to_region if self.sequence else mappings.copy_to_region
        return enter(x, self.tp)

    def context_rows(self, full: int) -> SequenceShard:
        """The positions of the queries of this rank's attention, out of a sequence of `full`."""
        of_ring = SequenceShard.zigzag(full, self.ring.rank, self.ring.size)
        return of_ring.part(self.ulysses.rank, self.ulysses.size)

    def hidden_rows(self, full: int) -> SequenceShard:
        """The positions of the activations between the layers on this rank."""
        rows = self.context_rows(full)
        return rows.part(self.tp.rank, self.tp.size) if self.sequence else rows

    def full_length(self, hidden: int) -> int:
        """The length of a sequence whose activations between the layers have `hidden` rows on this rank."""
        return hidden * (self.tp.size if self.sequence else 1) * self.cp.size


@dataclass(frozen=True)
class Shard:
    """The split of a parameter over tensor-parallel ranks: along `dim`, separately in each of `parts` equal blocks.

    parts = 2 is for gated MLPs, whose first layer stacks two matrices: a rank holds its slice of both.
    experts: the parameter is [experts, ...]; expert-parallel ranks split its dimension 0, and expert-tensor-parallel
    ranks split `dim`.
    """

    dim: int
    parts: int = 1
    experts: bool = False

    def of_expert(self) -> Shard:
        """The split of one expert's part of the parameter."""
        return Shard(self.dim - 1, self.parts)

    def slice(self, full: Tensor, rank: int, size: int) -> Tensor:
        """This rank's part of the full parameter; a copy, since a view would keep the full parameter in memory."""
        if size == 1:
            return full
        pieces = [block.chunk(size, self.dim)[rank] for block in full.chunk(self.parts, self.dim)]
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces, self.dim)
