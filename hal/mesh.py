"""The tensor, context, data, pipeline and expert parallel coordinates of each rank, and their communicators.

The order is Megatron's: tp varies fastest, then cp, dp, and pp slowest, so that the ranks that communicate most are
neighbours. Experts divide the same ranks of a pipeline stage in another way, as in Megatron: etp varies fastest, then
ep, then edp. `Layout` is arithmetic only; `Mesh` adds the communicators, which the backend creates on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from .comm.contract import Comm, SingleRankComm
from .comm.torch import TorchComm
from .core.backend import Backend
from .errors import ContractError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DIMS = ("tp", "cp", "dp", "pp")
"""From the dimension that varies fastest with the rank to the slowest."""

EXPERT_DIMS = ("etp", "ep", "edp", "pp")
"""The same for the weights of experts: ranks that share each expert, ranks that share the experts of a layer, and
replicas of both."""


@dataclass(frozen=True)
class Layout:
    """The number of ranks in each dimension.

    >>> Layout(tp=2, dp=2, pp=2, ep=2).coordinates(5)
    {'tp': 1, 'cp': 0, 'dp': 0, 'pp': 1, 'etp': 0, 'ep': 1, 'edp': 0}
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name in (*DIMS, "ep", "etp"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ContractError(f"layout: {name} must be a whole number of at least 1, got {size!r}")
        stage = self.tp * self.cp * self.dp
        if stage % (self.etp * self.ep):
            raise ContractError(
                f"layout: the {stage} ranks of tp*cp*dp are not divisible by etp*ep = {self.etp}*{self.ep}"
            )

    @property
    def edp(self) -> int:
        """The number of ranks that hold the same weights of experts."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @classmethod
    def of_world(cls, world: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> Layout:
        """The layout of `world` ranks, with as many data-parallel replicas as they allow."""
        sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
        wrong = next((name for name, size in sizes.items() if size < 1), None)
        if wrong is not None:
            raise ContractError(f"layout: {wrong} must be a whole number of at least 1, got {sizes[wrong]}")
        for named in (("tp", "cp", "pp"), ("ep", "etp", "pp")):
            used = [name for name in named if sizes[name] > 1]
            total = 1
            for name in used:
                total *= sizes[name]
            if world % total:
                product = f"{'*'.join(used)} = {'*'.join(str(sizes[name]) for name in used)}"
                product += f" = {total}" if len(used) > 1 else ""
                raise ContractError(
                    f"layout: world size {world} is not divisible by {product}; start a multiple of "
                    f"{lcm(tp * cp, ep * etp) * pp} processes or choose sizes whose product divides {world}"
                )
        return cls(tp=tp, cp=cp, dp=world // (tp * cp * pp), pp=pp, ep=ep, etp=etp)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's coordinate in each dimension."""
        if not 0 <= rank < self.world:
            raise ContractError(f"layout: rank {rank} is not in a world of {self.world}")
        coordinates = {}
        for dims in (DIMS, EXPERT_DIMS):
            rest = rank
            for name in dims:
                rest, coordinates[name] = divmod(rest, getattr(self, name))
        return coordinates

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates in DIMS; missing ones are 0."""
        result, stride = 0, 1
        for name in DIMS:
            result += coordinates.get(name, 0) * stride
            stride *= getattr(self, name)
        return result

    def group(self, rank: int, *dims: str) -> list[int]:
        """The ranks, ascending, that differ from `rank` in `dims` only, which are all in DIMS or all in EXPERT_DIMS."""
        among = next((known for known in (DIMS, EXPERT_DIMS) if set(dims) <= set(known)), None)
        if among is None:
            raise ContractError(
                f"layout: there is no group of the dimensions {', '.join(dims)}; choose from {', '.join(DIMS)}, or "
                f"from {', '.join(EXPERT_DIMS)}"
            )
        fixed = [d for d in among if d not in dims]
        own = self.coordinates(rank)

        def in_group(other: int) -> bool:
            coordinates = self.coordinates(other)
            return all(coordinates[d] == own[d] for d in fixed)

        return [other for other in range(self.world) if in_group(other)]


class Mesh:
    """A rank's coordinates in a layout and its communicators.

    All ranks must request the same groups in the same order. The communicator of a group of one rank is a
    `SingleRankComm`, which needs no backend: a mesh of one rank does not join the world.
    """

    def __init__(self, layout: Layout, backend: Backend, *, timeout: float = 600.0) -> None:
        """Joins the world, if the layout has more than one rank. Raises ContractError if the sizes differ."""
        self.layout, self.backend, self.timeout = layout, backend, timeout
        self.world = SingleRankComm("world") if layout.world == 1 else backend.comm(timeout=timeout)
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
        """The communicator of these global ranks, which include this one; created once."""
        if ranks not in self._comms:
            alone = len(ranks) == 1
            self._comms[ranks] = (
                SingleRankComm(f"rank {ranks[0]}") if alone else self.backend.comm(ranks, timeout=self.timeout)
            )
        return self._comms[ranks]

    def device_mesh(self, *dims: str) -> DeviceMesh:
        """The same group as a DeviceMesh, for torch's engines. Raises ContractError like `torch_group`."""
        from torch.distributed.device_mesh import DeviceMesh

        device = self.backend.device().type
        return DeviceMesh.from_group(self.torch_group(*dims), device, mesh_dim_names=("-".join(dims),))

    def torch_group(self, *dims: str) -> ProcessGroup:
        """The torch process group of `comm(*dims)`. Raises ContractError where the backend's Comm has none."""
        comm = self.comm(*dims)
        if comm.size == 1 and isinstance(self.world, TorchComm):
            return self.world.group_of_one()
        if not isinstance(comm, TorchComm):
            raise ContractError(
                f"group '{comm.name}' of backend '{self.backend.name}' has no torch process group, which torch's "
                "pipelining, fully_shard and distributed checkpoints need; return hal.torch_comm from Backend.comm"
            )
        return comm.group
