"""What a suite declares: cases, each with one candidate called "ours" and named peers that do the same work.

A suite is a module of this package with `cases() -> list[Case]`. Nothing is made until a worker process asks for it,
so a list of cases costs nothing and is the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

OURS = "ours"
Call = Callable[[], object]


@dataclass(frozen=True)
class Candidate:
    """One way of doing a case's work.

    make: runs in the worker and returns the call to be timed; it may raise to say that it cannot run here.
    process: candidates that name the same process share one; HAL's ("hal") and its peers' ("torch", ...) never do, so
        neither's process-wide settings touch the other.
    allocators: under which of machine.ALLOCATORS it runs; empty = under all of the case's.
    ranks: how many processes make the call together.
    """

    make: Callable[[], Call]
    process: str = "torch"
    allocators: tuple[str, ...] = ()
    ranks: int = 1


@dataclass(frozen=True)
class Case:
    """One piece of work. Its rows compare "ours" with every other candidate and with every budget.

    work: FLOP or bytes of one call, for the share of `ceiling` (a name in ceilings.CEILINGS).
    budgets: name -> seconds (or bytes) that ours may take, as a peer that needs no measuring.
    minus: a candidate whose time is subtracted from ours first; it is no peer.
    series, x: the line of the growth plot this case is a point of, and where.
    quantity: "seconds" of a call; "bytes" of memory beyond the inputs that one call needs at its peak; "counted bytes"
        or "counted share" for calls that return the figure themselves.
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
