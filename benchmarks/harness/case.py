"""The declarations of a suite: cases, each with one candidate called "ours" and named peers that do the same work.

A suite is a module with `cases() -> list[Case]`. Candidates are created only in worker processes, so building the list
is cheap, and the list is the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

OURS = "ours"
Thunk = Callable[[], object]
"""A call without arguments, whose time or memory is measured."""


@dataclass(frozen=True)
class Candidate:
    """One implementation of a case's work.

    make: runs in the worker and returns the call to measure; an exception means that it cannot run here.
    process: candidates with the same process name share a process. HAL ("hal") and its peers ("torch", ...) never do,
        so that process-wide settings of one do not affect the other.
    allocators: the entries of machine.ALLOCATORS that it runs under; empty: all of the case's.
    ranks: the number of processes that make the call together.
    """

    make: Callable[[], Thunk]
    process: str = "torch"
    allocators: tuple[str, ...] = ()
    ranks: int = 1


@dataclass(frozen=True)
class Case:
    """One workload. Its rows compare "ours" with every other candidate and with every budget.

    work: FLOP or bytes of one call, for the share of `ceiling` (a key of roofline.CEILINGS).
    budgets: name -> seconds (or bytes) that ours may take, i.e. a peer whose figure is given instead of measured.
    minus: a candidate whose time is subtracted from that of all others (the cost of an empty call); it is not a peer.
    series, x: the line of the growth plot to which this case adds a point, and the point's x coordinate.
    quantity: "seconds" of a call; "bytes" that one call adds to the resident memory at its peak; "counted bytes" or
        "counted share" for calls that return the figure themselves.
    """

    name: str
    shape: str
    candidates: Mapping[str, Candidate]
    work: float = 0.0
    ceiling: str = ""
    allocators: tuple[str, ...] = ("default",)
    budgets: Mapping[str, float] = field(default_factory=dict)
    minus: str = ""
    series: str = ""
    x: float = 0.0
    quantity: str = "seconds"

    def under(self, allocator: str) -> dict[str, Candidate]:
        """The candidates that run under this allocator."""
        return {n: c for n, c in self.candidates.items() if not c.allocators or allocator in c.allocators}
