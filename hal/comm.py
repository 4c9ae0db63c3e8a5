"""Collective communication: the contract, its meaning, and two communicators that need no transport.

The meaning of each collective is a function on a list of tensors, one per rank (`MEANING`): any transport must agree
with it. `Solo` is a group of one; `threads(n)` makes n communicators for n threads of one process, which is how tests
run ops that communicate. Inputs are never mutated.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import CollectiveTimeout, ContractError

REDUCE_OPS = ("sum", "max", "min", "avg")


def _reduce(xs: Sequence[Tensor], op: str) -> Tensor:
    stacked = torch.stack(list(xs))
    if op == "sum":
        return stacked.sum(0, dtype=xs[0].dtype)
    if op == "avg":
        return (stacked.sum(0, dtype=xs[0].dtype) / len(xs)).to(xs[0].dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _reduce_scatter(xs: Sequence[Tensor], op: str) -> list[Tensor]:
    return list(_reduce(xs, op).chunk(len(xs)))


MEANING: dict[str, Callable[..., list[Tensor]]] = {
    "all_reduce": lambda xs, op: [_reduce(xs, op)] * len(xs),
    "all_gather": lambda xs: [torch.cat(list(xs))] * len(xs),
    "reduce_scatter": _reduce_scatter,
    "broadcast": lambda xs, source: [xs[source]] * len(xs),
    "all_to_all": lambda xs: [torch.cat(parts) for parts in zip(*(x.chunk(len(xs)) for x in xs))],
}
"""Each collective as a function from every rank's input to every rank's output; gathers are along dimension 0."""


class Comm(ABC):
    """A group of ranks that communicate. `name` shows up in errors; `rank` is this process's place in the group."""

    name: str
    rank: int
    size: int

    def why_not(self, collective: str, x: Tensor, op: str | None = None) -> Sequence[str]:
        """Why the transport cannot run this collective on `x`; empty = it can."""
        return ()

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Elementwise reduction over all ranks ("sum", "max", "min", "avg")."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors (of one shape), concatenated along dimension 0 in rank order."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        """This rank's chunk (along dimension 0, which the group size divides) of the reduction."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank `source`."""

    @abstractmethod
    def all_to_all(self, x: Tensor) -> Tensor:
        """Chunk r of dimension 0 goes to rank r; the result concatenates what arrived, in rank order."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""


class Solo(Comm):
    """A group of one rank: every collective is the identity (a copy, since inputs are never mutated)."""

    def __init__(self, name: str = "solo") -> None:
        self.name, self.rank, self.size = name, 0, 1

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        _check_op(op)
        return x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        return x.clone()

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        _check_op(op)
        return x.clone()

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.clone()

    def all_to_all(self, x: Tensor) -> Tensor:
        return x.clone()

    def barrier(self) -> None:
        return None


class _Meeting:
    """Where the threads of one group exchange their tensors."""

    def __init__(self, size: int, timeout: float) -> None:
        self.slots: list[Any] = [None] * size
        self.arrived: set[int] = set()
        self.barrier = threading.Barrier(size)
        self.timeout = timeout


class ThreadComm(Comm):
    """One rank of a group whose ranks are threads of this process (see `threads`)."""

    def __init__(self, name: str, rank: int, meeting: _Meeting) -> None:
        self.name, self.rank, self.size = name, rank, len(meeting.slots)
        self._meeting, self._seq = meeting, 0

    def _wait(self, what: str) -> None:
        try:
            self._meeting.barrier.wait(self._meeting.timeout)
        except threading.BrokenBarrierError:
            absent = [r for r in range(self.size) if r not in self._meeting.arrived]
            raise CollectiveTimeout(self.name, self.rank, what, self._seq, absent, self._meeting.timeout) from None

    def _exchange(self, what: str, x: Tensor, **how: Any) -> Tensor:
        self._seq += 1
        meeting = self._meeting
        meeting.slots[self.rank] = (what, self._seq, x.detach())
        meeting.arrived.add(self.rank)
        self._wait(what)
        calls = {(w, s) for w, s, _ in meeting.slots}
        if len(calls) != 1:
            raise ContractError(f"group '{self.name}': ranks called different collectives: {sorted(calls)}")
        result = MEANING[what]([t for _, _, t in meeting.slots], **how)[self.rank].clone()
        self._wait(what)
        meeting.arrived.discard(self.rank)
        self._wait(what)
        return result

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        _check_op(op)
        return self._exchange("all_reduce", x, op=op)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._exchange("all_gather", x)

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        _check_op(op)
        return self._exchange("reduce_scatter", x, op=op)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return self._exchange("broadcast", x, source=source)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._exchange("all_to_all", x)

    def barrier(self) -> None:
        self._exchange("broadcast", torch.zeros(1), source=0)


def threads(size: int, *, timeout: float = 60.0, name: str = "threads") -> list[Comm]:
    """`size` communicators of one group, to be used by one thread each."""
    meeting = _Meeting(size, timeout)
    return [ThreadComm(name, rank, meeting) for rank in range(size)]


def _check_op(op: str) -> None:
    if op not in REDUCE_OPS:
        raise ContractError(f"unknown reduction {op!r}; choose one of {', '.join(REDUCE_OPS)}")
