"""Where each process stands: tensor, context, expert, data and pipeline parallel coordinates of a rank.

The order is Megatron's: tp varies fastest, then cp, ep, dp, and pp slowest, so that the ranks that talk most are
neighbours. `Layout` is arithmetic only; `Mesh` adds the communicators, made by the backend when first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from .backend import Backend
from .comm import Comm
from .comm_torch import TorchComm
from .errors import ContractError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DIMS = ("tp", "cp", "ep", "dp", "pp")
"""From the dimension that varies fastest with the rank to the slowest."""


@dataclass(frozen=True)
class Layout:
    """How many ranks each dimension has.

    >>> Layout(tp=2, dp=2, pp=2).coordinates(5)
    {'tp': 1, 'cp': 0, 'ep': 0, 'dp': 0, 'pp': 1}
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in DIMS:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ContractError(f"layout: {name} must be a whole number of at least 1, got {size!r}")

    @classmethod
    def of_world(cls, world: int, *, tp: int = 1, cp: int = 1, ep: int = 1, pp: int = 1) -> Layout:
        """The layout of `world` ranks, with as many data-parallel replicas as they allow."""
        one = cls(tp=tp, cp=cp, ep=ep, pp=pp)
        if world % one.world:
            parts = " x ".join(f"{name} {getattr(one, name)}" for name in DIMS if getattr(one, name) > 1)
            raise ContractError(
                f"layout: one replica takes {parts} = {one.world} ranks, which do not divide a world of {world}; start "
                f"a multiple of {one.world} processes or choose sizes whose product divides {world}"
            )
        return cls(tp=tp, cp=cp, ep=ep, dp=world // one.world, pp=pp)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return prod(getattr(self, name) for name in DIMS)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place in each dimension."""
        if not 0 <= rank < self.world:
            raise ContractError(f"layout: rank {rank} is not in a world of {self.world}")
        found = {}
        for name in DIMS:
            rank, found[name] = divmod(rank, getattr(self, name))
        return found

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; those not given are 0."""
        result, stride = 0, 1
        for name in DIMS:
            result += coordinates.get(name, 0) * stride
            stride *= getattr(self, name)
        return result

    def group(self, rank: int, *dims: str) -> list[int]:
        """The ranks, ascending, that differ from `rank` in `dims` only."""
        unknown = [d for d in dims if d not in DIMS]
        if unknown:
            raise ContractError(f"layout: there is no dimension {', '.join(unknown)}; choose from {', '.join(DIMS)}")
        mine = self.coordinates(rank)

        def same(other: int) -> bool:
            there = self.coordinates(other)
            return all(there[d] == mine[d] for d in DIMS if d not in dims)

        return [other for other in range(self.world) if same(other)]


class Mesh:
    """A rank's place in a layout and its communicators. Every rank asks for the same groups in the same order."""

    def __init__(self, layout: Layout, backend: Backend, *, timeout: float = 600.0) -> None:
        """Joins the world. Raises ContractError if it is not of the layout's size."""
        self.layout, self.backend, self.timeout = layout, backend, timeout
        self.world = backend.comm(timeout=timeout)
        if self.world.size != layout.world:
            raise ContractError(f"mesh: the layout has {layout.world} ranks, but {self.world.size} were started")
        self.rank = self.world.rank
        self.at = layout.coordinates(self.rank)
        self._comms: dict[tuple[int, ...], Comm] = {tuple(range(layout.world)): self.world}

    def comm(self, *dims: str) -> Comm:
        """The communicator of the ranks that differ from this one in `dims` only, e.g. comm("dp", "cp")."""
        ranks = tuple(self.layout.group(self.rank, *dims))
        comm = self.comm_of(ranks)
        if comm is not self.world:
            comm.name = "-".join(dims)
        return comm

    def comm_of(self, ranks: tuple[int, ...]) -> Comm:
        """The communicator of these global ranks, this one among them; made once."""
        if ranks not in self._comms:
            self._comms[ranks] = self.backend.comm(ranks, timeout=self.timeout)
        return self._comms[ranks]

    def device_mesh(self, *dims: str) -> DeviceMesh:
        """The same group as torch's engines take it. Raises ContractError where the backend's Comm has none."""
        from torch.distributed.device_mesh import DeviceMesh

        device = self.backend.device().type
        return DeviceMesh.from_group(self.torch_group(*dims), device, mesh_dim_names=("-".join(dims),))

    def torch_group(self, *dims: str) -> ProcessGroup:
        """The torch process group of `comm(*dims)`. Raises ContractError where the backend's Comm has none."""
        comm = self.comm(*dims)
        if not isinstance(comm, TorchComm):
            raise ContractError(
                f"group '{comm.name}' of backend '{self.backend.name}' has no torch process group, which torch's "
                "pipelining, fully_shard and distributed checkpoints need; return hal.torch_comm from Backend.comm"
            )
        return comm.group
