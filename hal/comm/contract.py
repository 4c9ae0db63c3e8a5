"""Collective communication: the contract, and each collective's definition.

A collective is defined by a function on a list of tensors, one per rank (`REFERENCE`): every transport must agree with
it. Inputs are never mutated, int64 stays int64, every collective can be asynchronous (`start`) and ends within the
communicator's timeout: with a result, or with `CollectiveTimeout` naming the ranks that did not arrive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ContractError, UnsupportedOp
from ..spans import listeners, span

REDUCE_OPS = ("sum", "max", "min", "avg")


def _reduce(xs: Sequence[Tensor], op: str) -> Tensor:
    """The elementwise reduction of tensors of one shape, in their dtype."""
    stacked = torch.stack(list(xs))
    if op == "sum":
        return stacked.sum(0, dtype=xs[0].dtype)
    if op == "avg":
        return average(stacked.sum(0, dtype=xs[0].dtype), len(xs))
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def average(total: Tensor, count: int) -> Tensor:
    """total / count in total's dtype; integers round towards zero, as a cast does."""
    if total.is_floating_point() or total.is_complex():
        return total / count
    return total.div(count, rounding_mode="trunc")


REFERENCE: dict[str, Callable[..., list[Tensor]]] = {
    "all_reduce": lambda xs, op, source: [_reduce(xs, op)] * len(xs),
    "all_gather": lambda xs, op, source: [torch.cat(list(xs))] * len(xs),
    "reduce_scatter": lambda xs, op, source: list(_reduce(xs, op).chunk(len(xs))),
    "broadcast": lambda xs, op, source: [xs[source]] * len(xs),
    "all_to_all": lambda xs, op, source: [torch.cat(parts) for parts in zip(*(x.chunk(len(xs)) for x in xs))],
    "barrier": lambda xs, op, source: list(xs),
}
"""Each collective as a function from every rank's input to every rank's output; gathers are along dimension 0."""

_REDUCING = ("all_reduce", "reduce_scatter")
_DIVIDING = ("reduce_scatter", "all_to_all")


class Work:
    """A collective in progress. `wait` returns its result (the same tensor each time) or raises its error."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result. On an accelerator its computation may still be in progress, as for the result of any op."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        assert self._result is not None
        return self._result

    def then(self, last: Callable[[Tensor], Tensor]) -> Work:
        """A Work whose result is `last(this result)`."""
        return Work(lambda: last(self.wait()))


@dataclass(frozen=True)
class Message:
    """One tensor to send to, or to receive from, rank `peer` of the group.

    For a receive, `tensor` gives shape, dtype and device of what will arrive; its contents are not touched.
    """

    peer: int
    tensor: Tensor


class Comm(ABC):
    """A group of ranks that communicate. `name` is for error messages; `rank` is this process's rank in the group.

    A transport implements `_start` and `_exchange_start`; the other methods are built on these. Every collective and
    every wait for one is a span (hal.spans), from which profiles and the detection of slow ranks are made.
    """

    name: str
    rank: int
    size: int
    device: torch.device = torch.device("cpu")
    """The device on which HAL allocates tensors for communication."""
    emulations: Mapping[str, str] = {}
    """Operations that HAL emulates because the transport lacks them, for reports: "avg" or a collective -> reason."""

    def why_not(self, collective: str, x: Tensor, op: str | None = None) -> Sequence[str]:
        """Reasons why the transport cannot run this collective on `x`, even by emulation; empty if it can."""
        return ()

    @abstractmethod
    def _start(self, collective: str, x: Tensor, op: str, source: int) -> Work:
        """Starts a collective whose arguments have been checked. Must not change x, nor keep a reference to it."""

    @abstractmethod
    def _exchange_start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        """Starts a batch whose messages have been checked; see `exchange_start`."""

    def exchange_start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        """Starts a batch of sends and receives. The function it returns waits, and returns what was received, in order.

        Between two ranks, messages are matched in the order in which each side lists them, and batches in the order
        in which they are started, regardless of the order in which they are waited for.
        """
        self._check_messages(sends, receives)
        if not listeners or self.size == 1:
            return self._exchange_start(sends, receives)
        size = sum(m.tensor.nbytes for m in sends)
        with self._span("exchange", "start", size):
            finish = self._exchange_start(sends, receives)

        def observed() -> list[Tensor]:
            with self._span("exchange", "wait", size):
                return finish()

        return observed

    def start(self, collective: str, x: Tensor, *, op: str = "sum", source: int = 0) -> Work:
        """Starts `collective` (a key of REFERENCE) on `x`.

        All ranks of the group must issue the same collectives in the same order.
        op: the reduction, for all_reduce and reduce_scatter. source: the sending rank, for broadcast.
        Raises ContractError for arguments that are invalid on every transport, UnsupportedOp if `why_not` returns
        reasons.
        """
        self._check(collective, x, op, source)
        x = x.detach() if x.requires_grad else x
        if not listeners or self.size == 1:
            return self._start(collective, x, op, source)
        size = x.nbytes
        with self._span(collective, "start", size):
            work = self._start(collective, x, op, source)

        def finish() -> Tensor:
            with self._span(collective, "wait", size):
                return work.wait()

        return Work(finish)

    def _now(self, collective: str, x: Tensor, op: str = "sum", source: int = 0) -> Tensor:
        if not listeners or self.size == 1:
            return self._checked_now(collective, x, op, source)
        with self._span(collective, "blocking", x.nbytes):
            return self._checked_now(collective, x, op, source)

    def _checked_now(self, collective: str, x: Tensor, op: str, source: int) -> Tensor:
        """Checks and runs a blocking collective. A transport overrides this if it can save checks."""
        self._check(collective, x, op, source)
        return self._run_now(collective, x.detach() if x.requires_grad else x, op, source)

    def _span(self, collective: str, part: str, size: int) -> AbstractContextManager[None]:
        """part: "blocking" (a complete collective), or the "start" or the "wait" of an asynchronous one. size: bytes of
        this rank's input."""
        return span("communication", collective, part=part, group=self.name, ranks=self.size, bytes=size)

    def _run_now(self, collective: str, x: Tensor, op: str, source: int) -> Tensor:
        """`_start`, then wait. A transport overrides this if it has a faster path for a blocking collective."""
        return self._start(collective, x, op, source).wait()

    def _check(self, collective: str, x: Tensor, op: str, source: int) -> None:
        # Error messages are formatted only where they are raised: formatting takes longer than a small collective.
        if collective not in REFERENCE:
            raise self._wrong(f"unknown collective {collective!r}; choose one of {', '.join(REFERENCE)}")
        if op not in REDUCE_OPS:
            raise self._wrong(f"unknown reduction {op!r}; choose one of {', '.join(REDUCE_OPS)}")
        if not 0 <= source < self.size:
            raise self._wrong(f"source {source} is not a rank of a group of {self.size}")
        if collective in _DIVIDING and (x.ndim == 0 or x.shape[0] % self.size):
            raise self._wrong(f"{collective}: {self.size} ranks cannot divide dimension 0 of shape {tuple(x.shape)}")
        if op == "avg" and x.dtype is torch.bool and collective in _REDUCING:
            raise self._wrong("bool tensors have no average; use 'max', or a float")
        if collective == "all_gather" and x.ndim == 0:
            raise self._wrong("all_gather: a scalar has no dimension 0; use x[None]")
        reasons = self.why_not(collective, x, op if collective in _REDUCING else None)
        if reasons:
            raise UnsupportedOp(f"{collective} on group '{self.name}': " + "; ".join(reasons))

    def _wrong(self, message: str) -> ContractError:
        return ContractError(f"group '{self.name}': {message}")

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Elementwise reduction over all ranks ("sum", "max", "min", "avg")."""
        return self._now("all_reduce", x, op)

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors (of one shape), concatenated along dimension 0 in rank order."""
        return self._now("all_gather", x)

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        """This rank's chunk (along dimension 0, which the group size divides) of the reduction."""
        return self._now("reduce_scatter", x, op)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank `source`; every rank passes one of its shape and dtype."""
        return self._now("broadcast", x, source=source)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Chunk r of dimension 0 goes to rank r; the result concatenates what arrived, in rank order."""
        return self._now("all_to_all", x)

    def exchange(self, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> list[Tensor]:
        """A batch of sends and receives; what was received, in the order of `receives`."""
        return self.exchange_start(sends, receives)()

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        # On a device, `_now` may return before the collective has completed; reading its result waits for that.
        self._now("barrier", torch.zeros(1, device=self.device)).item()

    def _check_messages(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for m in (*sends, *receives):
            if not 0 <= m.peer < self.size or m.peer == self.rank:
                raise self._wrong(f"rank {self.rank} cannot exchange with {m.peer}")


class SingleRankComm(Comm):
    """A group of one rank: every collective is the identity (a copy, since inputs are never mutated)."""

    def __init__(self, name: str = "single rank") -> None:
        self.name, self.rank, self.size = name, 0, 1

    def _start(self, collective: str, x: Tensor, op: str, source: int) -> Work:
        result = x.clone()
        return Work(lambda: result)

    def _exchange_start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        return list


def run_reference(inputs: Sequence[Tensor], collective: str, **how: Any) -> list[Tensor]:
    """The result of every rank when rank r passes inputs[r], computed in one process by the reference."""
    return REFERENCE[collective](list(inputs), how.get("op", "sum"), how.get("source", 0))
