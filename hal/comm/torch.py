"""Comm over torch.distributed's process groups, for any backend that has one (gloo, nccl, hccl, ...).

A backend declares its `Transport`: its name in torch, the operations that it lacks, and how HAL emulates them. HAL
emulates only what is declared. Every communicator has a timeout; when it expires, the error names the ranks that had
not arrived.
"""

from __future__ import annotations

import atexit
import datetime
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CollectiveFailed, CollectiveTimeout, ContractError, HalError
from .contract import Comm, Message, SingleRankComm, Work, average
from .network import interface_to
from .watchdog import Progress

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
_EMULATIONS = ("avg", "reduce_scatter", "all_to_all")
# torch 2.13 renamed both functions and warns about the old names; torch 2.11 has only the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Transport:
    """The capabilities of a torch.distributed backend, declared by the HAL backend that uses it.

    backend: its name for init_process_group.
    emulate: "avg" (sum, then divide), "reduce_scatter" (all_reduce, keep a chunk) or "all_to_all" (all_gather, keep
        the chunks) -> the reason.
    carry: dtype -> (dtype in which it is sent, reason). The carrier must represent every value, so int64 stays int64.
    refuse: (collective, dtype, reduction or None) -> reasons why neither works; called after `carry`.
    """

    backend: str
    emulate: Mapping[str, str] = field(default_factory=dict)
    carry: Mapping[torch.dtype, tuple[torch.dtype, str]] = field(default_factory=dict)
    refuse: Callable[[str, torch.dtype, str | None], Sequence[str]] = lambda collective, dtype, op: ()

    def __post_init__(self) -> None:
        unknown = [e for e in self.emulate if e not in _EMULATIONS]
        if unknown:
            raise HalError(f"transport '{self.backend}': no emulation of {unknown}; there is {', '.join(_EMULATIONS)}")
        for dtype, (carrier, _) in self.carry.items():
            if torch.promote_types(dtype, carrier) != carrier:
                raise HalError(f"transport '{self.backend}': {carrier} cannot carry {dtype}: values would be lost")


# The rest of an emulation costs nothing here, because gloo itself makes an all_reduce and copies from the result.
_GLOO_ADDS = {
    "reduce_scatter": "before torch 2.8, gloo adds whatever the reduction is (pytorch/pytorch pull request 149869)"
}
_GLOO_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}


def _gloo_refuses(collective: str, dtype: torch.dtype, op: str | None) -> Sequence[str]:
    # Refused before gloo is called: its own error may reach some ranks late, and would leave the group unusable.
    return () if dtype in _GLOO_DTYPES else (f"gloo has no {dtype}",)


GLOO = Transport(
    "gloo",
    emulate=(_GLOO_ADDS if torch.__version__.startswith(("2.6.", "2.7.")) else {})
    | {"avg": "gloo has no average (integers fail, floats depend on torch's version)"},
    carry={
        torch.bool: (torch.int32, "gloo adds bool as bytes, which wrap at 256 ranks"),
        torch.int16: (torch.int32, "gloo has no 16-bit integers"),
    },
    refuse=_gloo_refuses,
)
"""Sockets between processes' host memory; what CPU backends use."""


def torch_comm(
    transport: Transport,
    ranks: Sequence[int] | None = None,
    *,
    timeout: float = 600.0,
    device: torch.device | None = None,
    kind: type[TorchComm] | None = None,
) -> Comm:
    """A communicator over the global `ranks` (None = all); what `Backend.comm` returns on torch.distributed.

    The first call joins the world that the launcher described in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (or
    uses the default process group if there is one). Without those variables the world is this process alone. Only
    the members of `ranks` may call. timeout: seconds, for every collective. kind: the class of the communicator, for
    backends that have a faster path than the transport between some ranks (default TorchComm).
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return _single_process(ranks)
        missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
        if missing:
            raise HalError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {', '.join(missing)} is not set; "
                "start the processes with `hal launch` or torchrun"
            )
        interface = interface_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Without device_id: with one, torch makes every group by splitting the world's communicator, a call that NCCL
        # requires of all ranks of the world, not only of the group's members.
        dist.init_process_group(transport.backend, timeout=datetime.timedelta(seconds=timeout))
    world = dist.get_world_size()
    members = list(range(world)) if ranks is None else [int(r) for r in ranks]
    if sorted(set(members)) != members or not all(0 <= r < world for r in members):
        raise ContractError(f"a group's ranks must be ascending and in a world of {world}; got {members}")
    if dist.get_rank() not in members:
        raise ContractError(f"rank {dist.get_rank()} requested a group of the ranks {members}, which excludes it")
    if len(members) == 1:
        return SingleRankComm(f"rank {members[0]}")
    group = dist.new_group(
        members,
        datetime.timedelta(seconds=timeout),
        transport.backend,
        use_local_synchronization=True,
        # Connects the members eagerly, because the first exchange may involve only some of them.
        device_id=device if device is not None and device.index is not None else None,
    )
    name = "world" if len(members) == world else "ranks " + ",".join(map(str, members))
    return (kind or TorchComm)(group, transport, name=name, timeout=timeout, device=device)


def _single_process(ranks: Sequence[int] | None) -> Comm:
    """The communicator of a process that no launcher started."""
    if ranks is not None and list(ranks) != [0]:
        raise ContractError(f"there is one process, rank 0; a group of ranks {list(ranks)} needs a launcher")
    return SingleRankComm("world")


class TorchComm(Comm):
    """A Comm over one process group. `group` is for torch.distributed's own engines (pipelining, fully_shard, DCP)."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        transport: Transport,
        *,
        name: str,
        timeout: float,
        device: torch.device | None = None,
    ) -> None:
        self.group, self.transport, self.name, self.timeout = group, transport, name, timeout
        self.rank, self.size = group.rank(), group.size()
        self.emulations = transport.emulate
        self._ranks = dist.get_process_group_ranks(group)
        self._progress = Progress.of_world().group(group.group_name, self.rank, self.size)
        self.device = device or torch.device("cpu")
        self._broken: HalError | None = None
        _communicators.add(self)

    def group_of_one(self) -> dist.ProcessGroup:
        """A process group of this rank alone, for engines of torch whose communication cannot be disabled otherwise."""
        timeout = datetime.timedelta(seconds=self.timeout)
        backend = self.transport.backend
        alone: dist.ProcessGroup = dist.new_group([dist.get_rank()], timeout, backend, use_local_synchronization=True)
        return alone

    def on_one_machine(self) -> bool:
        """Whether the launcher has started all ranks on one machine (LOCAL_WORLD_SIZE consecutive ranks on each)."""
        each = int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
        return self._ranks[0] // each == self._ranks[-1] // each

    def why_not(self, collective: str, x: Tensor, op: str | None = None) -> Sequence[str]:
        dtype = self.transport.carry[x.dtype][0] if x.dtype in self.transport.carry else x.dtype
        if not x.numel():
            return ()  # nothing is sent
        if dtype.is_complex and op in ("max", "min"):
            return (f"complex numbers have no {op}",)
        return tuple(self.transport.refuse(collective, dtype, op))

    def _start(self, collective: str, x: Tensor, op: str, source: int) -> Work:
        emulate = self.transport.emulate
        if op == "avg" and "avg" in emulate and collective in ("all_reduce", "reduce_scatter"):
            # Before `carry`: the sum is converted back to x's dtype, in which it may wrap, before it is divided.
            return self._start(collective, x, "sum", source).then(lambda total: average(total, self.size))
        if x.dtype in self.transport.carry:
            dtype = x.dtype
            return self._start(collective, x.to(self.transport.carry[dtype][0]), op, source).then(lambda y: y.to(dtype))
        if collective in emulate:
            whole = self._start("all_reduce" if collective == "reduce_scatter" else "all_gather", x, op, source)
            return whole.then(self._my_chunk if collective == "reduce_scatter" else self._my_chunks)
        return self._run(collective, x.contiguous(), op, source)

    def _my_chunk(self, whole: Tensor) -> Tensor:
        """This rank's part of [size * n, ...], as a copy [n, ...]: the result of reduce_scatter."""
        return whole.chunk(self.size)[self.rank].clone()

    def _my_chunks(self, gathered: Tensor) -> Tensor:
        """This rank's part of every rank's [size * n, ...] in [size * size * n, ...]: the result of all_to_all."""
        return torch.cat([part.chunk(self.size)[self.rank] for part in gathered.chunk(self.size)])

    def _run(self, collective: str, x: Tensor, op: str, source: int) -> Work:
        """Starts a collective that the transport has, on a contiguous `x` of a dtype that it can send."""
        arguments: dict[str, Any] = {"group": self.group, "async_op": True}
        n, rest = (x.shape[0], x.shape[1:]) if x.ndim else (1, ())
        if collective in ("all_reduce", "barrier"):
            out = x.clone()
            begin = lambda: dist.all_reduce(out, _OPS[op], **arguments)  # noqa: E731
        elif collective == "broadcast":
            out = x.clone()
            begin = lambda: dist.broadcast(out, group_src=source, **arguments)  # noqa: E731
        elif collective == "all_gather":
            out = x.new_empty((n * self.size, *rest))
            begin = lambda: self._gather_into(out, x, arguments)  # noqa: E731
        elif collective == "reduce_scatter":
            out = x.new_empty((n // self.size, *rest))
            begin = lambda: self._scatter_into(out, x, _OPS[op], arguments)  # noqa: E731
        else:
            out = torch.empty_like(x)
            begin = lambda: dist.all_to_all_single(out, x, **arguments)  # noqa: E731
        if not x.numel():
            # Transports disagree on empty tensors. x is empty on every rank, so there is nothing to communicate.
            return Work(lambda: out)
        seq = self._progress.arrive(collective)
        work = self._guarded(begin, collective, seq)

        def finish() -> Tensor:
            self._guarded(work.wait, collective, seq)
            return out

        return Work(finish)

    def _gather_into(self, out: Tensor, x: Tensor, arguments: dict[str, Any]) -> Any:
        """Starts to gather every rank's contiguous x [n, ...] into out [size * n, ...]; returns torch's handle."""
        return _all_gather(out, x, **arguments)

    def _scatter_into(self, out: Tensor, x: Tensor, op: Any, arguments: dict[str, Any]) -> Any:
        """Starts to reduce x [size * n, ...] and to scatter it into out [n, ...]; returns torch's handle."""
        return _reduce_scatter(out, x, op, **arguments)

    def _exchange_start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        results = [torch.empty_like(m.tensor, memory_format=torch.contiguous_format) for m in receives]
        outgoing = [m.tensor.detach().resolve_conj().resolve_neg().contiguous() for m in sends]
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=m.peer, tag=tag)
            for x, m, tag in zip(outgoing, sends, _order(sends))
        ] + [
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=m.peer, tag=tag)
            for x, m, tag in zip(results, receives, _order(receives))
        ]
        if not operations:
            return list
        peers = sorted({m.peer for m in (*sends, *receives)})
        works = self._guarded(lambda: dist.batch_isend_irecv(operations), "exchange", 0, peers)

        def finish() -> list[Tensor]:
            for work in works:
                self._guarded(work.wait, "exchange", 0, peers)
            # Referenced until here, because the transport may read the tensors until the exchange has completed.
            outgoing.clear()
            return results

        return finish

    def _guarded(self, call: Callable[[], Any], what: str, seq: int, peers: Sequence[int] | None = None) -> Any:
        """`call()`, with torch's error replaced by HAL's. After an error, the group raises that error every time."""
        if self._broken is not None:
            raise self._broken
        try:
            return call()
        except RuntimeError as error:
            self._broken = self._explain(error, what, seq, peers)
            raise self._broken from error

    def first_missing(self) -> tuple[TorchComm, int, str, list[int]] | None:
        """(self, number, name, absent global ranks) of the group's first collective that a rank has not started."""
        counts = self._progress.counts_behind()
        if not counts:
            return None
        seq = min(counts.values()) + 1
        return self, seq, self._progress.op_of(seq), [self._ranks[r] for r, n in counts.items() if n < seq]

    def _explain(self, error: RuntimeError, what: str, seq: int, peers: Sequence[int] | None) -> HalError:
        missing = peers if peers is not None else self._progress.missing_ranks(what, seq)
        return self._explained(error, what, seq, [self._ranks[r] for r in missing])

    def _explained(self, error: RuntimeError, what: str, seq: int, absent: Sequence[int]) -> HalError:
        if "imed out" in str(error) or "timeout" in str(error):
            return CollectiveTimeout(self.name, dist.get_rank(), what, seq, absent, self.timeout)
        first = str(error).splitlines()[0]
        return CollectiveFailed(
            f"{what} #{seq} on group '{self.name}' failed on rank {dist.get_rank()}: {first}. Ranks that did not "
            f"arrive: {', '.join(map(str, absent)) or 'none'}. A rank that ended is the usual cause: see its log first."
        )


_communicators: weakref.WeakSet[TorchComm] = weakref.WeakSet()


@atexit.register
def _join_gloo_threads() -> None:
    """Releases gloo's process groups, whose destructors wait for the groups' threads.

    A thread of gloo drops its reference to a tensor some time after the collective has completed. If that is the last
    reference, it needs the interpreter's lock, and if the interpreter has ended by then, the process aborts.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        for comm in list(_communicators):
            del comm.group
        Progress.release()
        dist.destroy_process_group()


def engine_failure(error: RuntimeError, what: str, timeout: float, seq: int = 0) -> HalError | None:
    """The HAL error for a failure inside one of torch.distributed's engines, or None if it is not about communication.

    what, seq: what the engine was doing and its number, e.g. "step" and 7.

    The engines (pipelining, fully_shard) use process groups directly, and wrap the errors that they catch.
    """
    chain: list[BaseException] = [error]
    while (chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)  # type: ignore[arg-type]
    known = next((e for e in chain if isinstance(e, HalError)), None)
    if known is not None:
        return known
    text = next((str(e) for e in chain if _ABOUT_TRANSPORT.search(str(e))), None)
    if text is None:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    absent = Progress.of_world().missing_ranks(rank, size, min(5.0, timeout))
    if "imed out" in text or "timeout" in text:
        return CollectiveTimeout("world", rank, what, seq, absent, timeout)
    return CollectiveFailed(
        f"{what} #{seq} failed on rank {rank}: {text.splitlines()[0]}. Ranks that did not fail too: "
        f"{', '.join(map(str, absent)) or 'none'}. A rank that ended is the usual cause: see its log first."
    )


def collective_failure(error: RuntimeError) -> HalError | None:
    """The HAL error for a collective that failed on the device, found where the host waited; None for other errors.

    For `Backend.device_failure` of transports whose waits are ordered on the device. The host has run ahead, so the
    collective is the first one of a group that some rank has not started.
    """
    if not dist.is_initialized() or not _ABOUT_TRANSPORT.search(str(error)):
        return None
    behind = [found for comm in list(_communicators) if (found := comm.first_missing()) is not None]
    if not behind:
        return engine_failure(error, "collective", max((c.timeout for c in _communicators), default=60.0))
    comm, seq, op, absent = behind[0]
    comm._broken = comm._explained(error, op, seq, absent)
    return comm._broken


_ABOUT_TRANSPORT = re.compile(r"gloo|timed out|timeout|NCCL|HCCL|onnection (closed|reset|refused)|peer")


def _order(messages: Sequence[Message]) -> list[int]:
    """For each message, how many earlier ones of the list have the same peer."""
    return [sum(m.peer == earlier.peer for earlier in messages[:i]) for i, m in enumerate(messages)]
