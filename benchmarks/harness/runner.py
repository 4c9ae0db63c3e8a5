"""Runs suites: every case under each of its allocators, in worker processes; collects rows and absent comparisons."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from . import goals
from .case import OURS, Case
from .engine import CEILING, LOOKS, Absent, Effort, Row, Samples, growth, rows, sample
from .roofline import CEILINGS
from .workers import Unavailable, Workers

SUITES = {
    n: f"hal.bench.suites.{n}"
    for n in ("attention", "ops", "linear", "moe", "dispatch", "comm", "train", "frameworks", "scaling")
}
"""Suite -> module with `cases()`."""


@dataclass
class Results:
    """The results of a run, in order."""

    rows: list[Row] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    interrupted: bool = False

    @property
    def misses(self) -> list[str]:
        """A sentence for every goal that is not met."""
        misses = [r.miss for r in self.rows if not r.met]
        for a in self.absent:
            if a.goal is not None:
                misses.append(f"{a.name} {a.shape}, {a.allocator} malloc: not measured against {a.peer}: {a.reason}")
        return list(dict.fromkeys(misses))

    @property
    def goals(self) -> int:
        """The number of goals that apply to the requested comparisons."""
        return sum(r.wanted for r in self.rows) + sum(a.goal is not None for a in self.absent)


def run(
    suites: Sequence[str],
    backend: str,
    *,
    peers: Sequence[str] = (),
    only: Sequence[str] = (),
    one_thread: bool = False,
    effort: Effort | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Results:
    """Measures the suites on `backend`.

    peers: only these (empty: all). only: see `selected`. one_thread: see machine.ONE_THREAD.
    report: called with a line of text after each case.
    """
    results = Results()
    effort = effort or (Effort(rounds=5, least=3) if one_thread else Effort())
    runs = [
        CaseRun(suite, index, case, allocator, backend, peers, effort)
        for suite in suites
        for index, case in selected(suite, only)
        for allocator in case.allocators
    ]
    try:
        measure(runs, lambda suite: Workers(SUITES[suite], backend, one_thread), report)
    except KeyboardInterrupt:
        results.interrupted = True
    for suite in suites:
        of_suite = [case_run for case_run in runs if case_run.suite == suite]
        measured = [row for case_run in of_suite for row in case_run.rows()]
        measured += growth(suite, measured, lambda n, s: ratio_goal(backend, n, s, "linear growth", "default"))
        results.rows += measured
        results.absent += [absent for case_run in of_suite for absent in case_run.absent]
    return results


def measure(runs: Sequence[CaseRun], workers_of: Callable[[str], Workers], report: Callable[[str], None]) -> None:
    """Measures every case, and then again those whose figures are close to a goal (see LOOKS).

    workers_of: the workers of a suite. They are closed before those of the next suite start.
    """
    for look in range(LOOKS):
        due = [case_run for case_run in runs if look == 0 or case_run.uncertain]
        for suite, of_suite in groupby(due, lambda case_run: case_run.suite):
            with workers_of(suite) as workers:
                for case_run in of_suite:
                    case_run.measure(workers)
                    report(case_run.summary + (f", measured {look + 1} times" if look else ""))


def selected(suite: str, only: Sequence[str]) -> list[tuple[int, Case]]:
    """The suite's cases with their numbers. If `only` is not empty, only cases whose name and shape contain one of its
    texts."""
    cases: list[Case] = importlib.import_module(SUITES[suite]).cases()
    return [
        (index, case)
        for index, case in enumerate(cases)
        if not only or any(text in f"{case.name} {case.shape}" for text in only)
    ]


def ratio_goal(backend: str, name: str, shape: str, peer: str, allocator: str) -> float | None:
    """The ratio required of a comparison, or None. Goals exist for one backend only."""
    return goals.ratio(name, shape, peer, allocator) if backend == goals.BACKEND else None


@dataclass
class CaseRun:
    """One case under one allocator.

    samples: all rounds of all calls of `measure`, or None before the first. absent: the comparisons without figures.
    """

    suite: str
    index: int
    case: Case
    allocator: str
    backend: str
    peers: Sequence[str]
    effort: Effort
    samples: Samples | None = None
    absent: list[Absent] = field(default_factory=list)

    def measure(self, workers: Workers) -> None:
        """Measures the case, unless it has none of the requested peers; a later call adds rounds to those before."""
        names = self.case.under(self.allocator)
        peers = [n for n in names if n not in (OURS, self.case.minus) and (not self.peers or n in self.peers)]
        if not peers and (self.peers or not self.case.budgets):
            return
        if self.samples is not None:
            peers = [n for n in peers if n in self.samples.rounds[0]]
        try:
            available = self._prepare(workers, peers)
            if OURS not in available:
                return
            # Every point affects the exponent of its series, so all rounds are measured at each point of a series with
            # a goal.
            growth_goal = ratio_goal(self.backend, "growth", self.case.series, "linear growth", self.allocator)
            samples = sample(
                self.case,
                available,
                workers,
                self.effort,
                lambda s: growth_goal is None and all(r.settled for r in self._rows(s)),
            )
        except KeyboardInterrupt:
            workers.kill()  # the call in progress may take minutes
            raise
        finally:
            workers.release()
        measured = self._rows(samples)
        if self.case.quantity == "bytes" and any(r.ours <= 0 for r in measured):
            # The call used memory that the process already had, so the ratio would be meaningless.
            seen = f"no memory was seen to be used ({measured[0].ours:.0f} bytes)"
            self._add_absent([*peers, *self.case.budgets], seen)
            return
        self.samples = samples if self.samples is None else self.samples + samples

    @property
    def uncertain(self) -> bool:
        """Whether another measurement at a later time may change the verdict about a goal."""
        return self.case.quantity == "seconds" and any(r.close for r in self.rows())

    @property
    def summary(self) -> str:
        """One line with all ratios."""
        ratios = ", ".join(f"{r.ratio_median:.2f}x {r.peer}" for r in self.rows())
        return f"{self.suite}: {self.case.name} {self.case.shape}, {self.allocator} malloc: {ratios or 'not measured'}"

    def rows(self) -> list[Row]:
        """The comparisons, over all rounds."""
        return [] if self.samples is None else self._rows(self.samples)

    def _prepare(self, workers: Workers, peers: Sequence[str]) -> list[str]:
        """Creates the candidates. Returns those that can run here, or none if ours cannot run."""
        minus = [self.case.minus] if self.case.minus else []
        ceiling = [CEILING] if self.case.ceiling else []
        available = []
        for name in [OURS, *minus, *peers, *ceiling]:
            try:
                workers.prepare(self.index, self.case, name, self.allocator)
                available.append(name)
            except Unavailable as error:
                if name in (OURS, *minus):
                    self._add_absent([*peers, *self.case.budgets], f"{name}: {error}")
                    return []
                self._add_absent([name], str(error))
        return available

    def _rows(self, samples: Samples) -> list[Row]:
        case = self.case
        share_goal = None
        if self.backend == goals.BACKEND:
            share_goal = goals.share(case.name, case.shape, case.ceiling, self.allocator)
        work = CEILINGS[case.ceiling].work if case.ceiling else 0.0
        return rows(
            self.suite, case, self.allocator, samples, ceiling_work=work, goal=self._goal, share_goal=share_goal
        )

    def _goal(self, peer: str) -> float | None:
        return ratio_goal(self.backend, self.case.name, self.case.shape, peer, self.allocator)

    def _add_absent(self, peers: Sequence[str], reason: str) -> None:
        for peer in peers:
            self.absent.append(
                Absent(self.suite, self.case.name, self.case.shape, peer, self.allocator, reason, self._goal(peer))
            )
