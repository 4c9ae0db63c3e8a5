"""Exchanges rows between ranks that share the experts of a layer, overlapped with other computation.

Each direction is one batch of messages of any lengths, and is the gradient of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hal import Comm, Message


class Route:
    """The lengths of the messages of one exchange of rows.

    sent: rows for each expert-parallel rank, which go to every one of its `copies` expert-tensor-parallel ranks.
    received: rows from each rank of comm.
    """

    def __init__(self, comm: Comm, copies: int, sent: list[int], received: list[int]) -> None:
        self.comm, self.copies, self.sent, self.received = comm, copies, sent, received

    def start(self, parts: Sequence[Tensor], counts: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Starts to send parts[r] to rank r. The function it returns waits for what arrives from each rank, of `counts`
        rows."""
        own, x = self.comm.rank, parts[0]
        peers = [r for r in range(self.comm.size) if r != own]
        sends = [Message(r, parts[r]) for r in peers if len(parts[r])]
        receives = [Message(r, x.new_empty(counts[r], *x.shape[1:])) for r in peers if counts[r]]
        finish = self.comm.exchange_start(sends, receives)

        def arrived() -> list[Tensor]:
            tensors = {m.peer: tensor for m, tensor in zip(receives, finish())}
            tensors[own] = parts[own]
            return [tensors[r] if r in tensors else x.new_empty(0, *x.shape[1:]) for r in range(self.comm.size)]

        return arrived

    def spread(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts to send rows ordered by expert; waits for the rows of this rank's experts, in the order of the ranks
        they come from."""
        parts = torch.split(x[: sum(self.sent)], self.sent)
        arrived = self.start([part for part in parts for _ in range(self.copies)], self.received)
        return lambda: torch.cat(arrived())

    def collect(self, y: Tensor, length: int) -> Callable[[], Tensor]:
        """The reverse: sends results for the rows that `spread` returned; waits for the sums for the rows it was given,
        and adds zeros up to `length` rows."""
        counts = [count for count in self.sent for _ in range(self.copies)]
        arrived = self.start(torch.split(y, self.received), counts)

        def sums() -> Tensor:
            parts, k = arrived(), self.copies
            added = [sum(parts[i + 1 : i + k], parts[i]) for i in range(0, len(parts), k)]
            return torch.cat([*added, y.new_zeros(length - sum(self.sent), *y.shape[1:])])

        return sums


class Exchange:
    """`Route.spread` or, with a length, `Route.collect`, in progress; each is the gradient of the other."""

    def __init__(self, route: Route, length: int | None = None) -> None:
        self.route, self.length = route, length
        self.rows = 0
        self.finish: Callable[[], Tensor] | None = None

    def forward(self, x: Tensor) -> None:
        """Starts the exchange of x."""
        self.rows = len(x)
        self.finish = self.route.spread(x) if self.length is None else self.route.collect(x, self.length)

    def backward(self, dy: Tensor) -> None:
        """Starts the exchange of the gradient of the result."""
        self.finish = self.route.collect(dy, self.rows) if self.length is None else self.route.spread(dy)

    def wait(self) -> Tensor:
        """Waits, and returns the result of the exchange in progress."""
        assert self.finish is not None
        finish, self.finish = self.finish, None
        return finish()


def start_exchange(x: Tensor, exchange: Exchange) -> Callable[[], Tensor]:
    """Starts the exchange of x. The function it returns waits for the result.

    Start and end are separate nodes of the graph. Autograd runs the latest nodes first: in the backward pass it
    starts the exchange of the gradient, runs what was computed between the two, and waits.
    """
    token: Tensor = _Started.apply(x, exchange)  # type: ignore[no-untyped-call]
    return lambda: _Finished.apply(token, exchange)  # type: ignore[no-untyped-call]


class _Started(torch.autograd.Function):
    """An empty tensor, which connects the start of an exchange with its end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.forward(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Finished(torch.autograd.Function):
    """The rows that an exchange has received; its backward pass starts the exchange of their gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.backward(dy.contiguous())
        return dy.new_empty(0), None
