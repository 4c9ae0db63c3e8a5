"""Connections that may not wait idle for ever: a client has a limited time for the head of a request.

uvicorn has a timeout between requests only, so that a client that sends nothing, or a byte, keeps its socket.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """A connection that is closed if the head of a request has not arrived `seconds` after it was opened or after the
    first byte of that request, or if its address has `most` others open."""

    seconds: ClassVar[float] = 30.0
    most: ClassVar[int] = 256
    _open: ClassVar[Counter[str]] = Counter()
    _deadline: asyncio.TimerHandle | None = None
    _address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = str((self.client or ("",))[0])
        self._open[self._address] += 1
        if self._open[self._address] > self.most:
            transport.abort()
        self._deadline = self.loop.call_later(self.seconds, self._close)

    def connection_lost(self, error: Exception | None) -> None:
        self._forget_deadline()
        self._open[self._address] -= 1
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # the head is complete; the application limits the time of the body
            self._forget_deadline()
        elif self._deadline is None and self.cycle.response_complete:
            self._deadline = self.loop.call_later(self.seconds, self._close)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def server_config(app: Any, *, host: str, port: int, seconds: float, connections: int = 256) -> uvicorn.Config:
    """uvicorn's settings for `app`. seconds: time for the head of a request. connections: most of one address.

    They have no limit_concurrency, which counts idle connections: the application limits the requests that wait.
    """
    members: dict[str, Any] = {"seconds": seconds, "most": connections, "_open": Counter()}
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=type("Connection", (Connection,), members),
        log_level="warning",
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=10,
    )
