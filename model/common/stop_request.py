"""SIGINT and SIGTERM as a request to stop after the current iteration; a second SIGINT stops immediately."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopRequest:
    """Context manager that catches SIGINT and SIGTERM: `asked` is the name of the one that arrived, or None.

    Only usable in the main thread.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
