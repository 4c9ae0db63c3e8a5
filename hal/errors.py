"""Every error HAL raises on purpose.

Each message states what was requested, what was found, and what to do next, and ends with the command that explains its
kind of error (`hal explain`, which prints a section of docs/errors.md). A caller that catches `HalError` catches all of
them; the two that also are a standard exception (`ContractError`, `UnsupportedOp`) can be caught as that one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SEE = re.compile(r" \(hal explain \w+\)")


class HalError(Exception):
    """Base of every error below."""

    def __str__(self) -> str:
        kind = next(c for c in type(self).__mro__ if c.__module__ == __name__)
        # A message that quotes another HalError would otherwise end with two references.
        return f"{_SEE.sub('', super().__str__())} (hal explain {kind.__name__})"


class BackendNotFound(HalError):
    """No backend of that name is registered, or none was chosen."""


class BackendUnavailable(HalError):
    """The backend exists, but this machine cannot run it (no device, no driver, no compiler, ...)."""


class PluginError(HalError):
    """A backend package is broken, registered twice, or written for another `Backend.api`."""


class ContractError(HalError, ValueError):
    """A call that is wrong on every backend: shapes, dtypes or values contradict the op's contract."""


class UnsupportedOp(HalError, NotImplementedError):
    """The call is valid, but no implementation of the active backend accepts it; the text lists every reason."""


class DeviceError(HalError):
    """Work on the device failed; the error may have surfaced after the call that caused it.

    `calls`: the calls issued since the device was last synchronised, the oldest first.
    """

    def __init__(self, text: str, calls: Sequence[str]) -> None:
        self.calls = tuple(calls)
        super().__init__(text)


class CollectiveFailed(HalError):
    """A collective ended without a result: the process of another rank has ended, or the transport failed."""


class CollectiveTimeout(CollectiveFailed):
    """A collective did not complete in time.

    `group` is the name of the communicator, `rank` the caller's rank in it, `op` the collective, `seq` the number of
    collectives the caller had started on that communicator, and `absent` the ranks that had not arrived.
    """

    def __init__(self, group: str, rank: int, op: str, seq: int, absent: Sequence[int], seconds: float) -> None:
        self.group, self.rank, self.op, self.seq, self.absent = group, rank, op, seq, tuple(absent)
        missing = ", ".join(map(str, absent)) if absent else "unknown (the transport does not report them)"
        super().__init__(
            f"{op} #{seq} on group '{group}' timed out after {seconds:g} s on rank {rank}; ranks that did not arrive: "
            f"{missing}. Look at the logs of those ranks first; raise the timeout only if they were merely slow."
        )
