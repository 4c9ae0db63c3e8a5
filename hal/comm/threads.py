"""A communicator between threads of one process: collectives without a transport, for tests.

`threads(n)` makes the n communicators of one group; `run_threads(n, f)` runs f(comm) on n threads. They compute
their results with `hal.comm.contract.REFERENCE`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from ..errors import CollectiveTimeout, ContractError
from .contract import REFERENCE, Comm, Message, Work

R = TypeVar("R")


class _Meeting:
    """The shared state through which the threads of one group exchange their tensors."""

    def __init__(self, size: int, timeout: float) -> None:
        self.slots: list[Any] = [None] * size
        self.arrived: set[int] = set()
        self.barrier = threading.Barrier(size)
        self.timeout = timeout
        self.mail: dict[tuple[int, int, int], queue.Queue[Tensor]] = {}
        self.lock = threading.Lock()

    def box(self, source: int, to: int, number: int) -> queue.Queue[Tensor]:
        """The queue that carries the `number`-th message from `source` to `to`."""
        with self.lock:
            return self.mail.setdefault((source, to, number), queue.Queue())


class ThreadComm(Comm):
    """One rank of a group whose ranks are threads of this process (see `threads`).

    A collective has completed when `start` returns.
    """

    def __init__(self, name: str, rank: int, meeting: _Meeting) -> None:
        self.name, self.rank, self.size = name, rank, len(meeting.slots)
        self._meeting, self._seq = meeting, 0
        self._sent, self._expected = [0] * self.size, [0] * self.size

    def _timeout(self, what: str, absent: Sequence[int]) -> CollectiveTimeout:
        return CollectiveTimeout(self.name, self.rank, what, self._seq, absent, self._meeting.timeout)

    def _wait(self, what: str) -> None:
        try:
            self._meeting.barrier.wait(self._meeting.timeout)
        except threading.BrokenBarrierError:
            raise self._timeout(what, [r for r in range(self.size) if r not in self._meeting.arrived]) from None

    def _start(self, collective: str, x: Tensor, op: str, source: int) -> Work:
        self._seq += 1
        meeting = self._meeting
        meeting.slots[self.rank] = ((collective, self._seq, op, source), x)
        meeting.arrived.add(self.rank)
        self._wait(collective)
        calls = {call for call, _ in meeting.slots}
        if len(calls) != 1:
            raise ContractError(f"group '{self.name}': ranks called different collectives: {sorted(calls)}")
        result = REFERENCE[collective]([t for _, t in meeting.slots], op, source)[self.rank].clone()
        self._wait(collective)
        meeting.arrived.discard(self.rank)
        self._wait(collective)
        return Work(lambda: result)

    def _exchange_start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        self._seq += 1
        for m in sends:
            self._meeting.box(self.rank, m.peer, self._sent[m.peer]).put(m.tensor.detach().clone())
            self._sent[m.peer] += 1
        # Numbered here, not in `finish`: batches are matched in the order in which they start.
        numbers = []
        for m in receives:
            numbers.append((m.peer, self.rank, self._expected[m.peer]))
            self._expected[m.peer] += 1

        def finish() -> list[Tensor]:
            meeting = self._meeting
            try:
                arrived = [meeting.box(*number).get(timeout=meeting.timeout) for number in numbers]
            except queue.Empty:
                raise self._timeout("exchange", sorted({m.peer for m in receives})) from None
            with meeting.lock:
                for number in numbers:
                    del meeting.mail[number]
            return arrived

        return finish


def threads(size: int, *, timeout: float = 60.0, name: str = "threads") -> list[Comm]:
    """`size` communicators of one group, to be used by one thread each."""
    meeting = _Meeting(size, timeout)
    return [ThreadComm(name, rank, meeting) for rank in range(size)]


def run_threads(size: int, function: Callable[[Comm], R], *, timeout: float = 60.0) -> list[R]:
    """The results of function(comm) run by `size` threads, in rank order; the first rank's exception propagates."""
    with ThreadPoolExecutor(size) as pool:
        return [f.result() for f in [pool.submit(function, c) for c in threads(size, timeout=timeout)]]
