"""The calls issued since the device was last synchronised, because a device's error may surface after its call.

`after` runs after every forward and backward of an implementation of an asynchronous backend: it records the call or,
in synchronous mode, waits for it. It is None for other backends, which saves the time of the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..errors import DeviceError

LIMIT = 1000
"""The maximum number of recorded calls; a training step of a small model makes about 500."""

_calls: deque[str] = deque(maxlen=LIMIT)
after: Callable[[str], None] | None = None


def note(call: str) -> None:
    """Records a call as issued."""
    _calls.append(call)


def synchronising(synchronize: Callable[[], None]) -> Callable[[str], None]:
    """A function for `after` that waits for the call's work, and raises DeviceError with the call's name."""

    def wait(call: str) -> None:
        try:
            synchronize()
        except RuntimeError as error:
            raise DeviceError(f"{call} failed on the device: {error}", [call]) from error

    return wait


def calls() -> list[str]:
    """The calls issued since the last synchronisation, the oldest first."""
    return list(_calls)


def forget() -> None:
    """To be called when the device has been synchronised."""
    _calls.clear()
