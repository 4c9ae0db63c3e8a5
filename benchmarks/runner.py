"""Runs a suite: every case under each of its allocators, in worker processes, and collects rows and absences."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import goals
from .case import OURS, Case
from .ceilings import CEILINGS
from .engine import CEILING, LOOKS, Absent, Effort, Row, Samples, growth, interleave, rows
from .worker import Unavailable, Workers

SUITES = {n: f"hal.bench.{n}" for n in ("attention", "ops", "linear", "dispatch", "comm", "train", "scaling")}
"""Suite -> module with `cases()`."""


@dataclass
class Found:
    """What a run produced, in order."""

    rows: list[Row] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    interrupted: bool = False

    @property
    def misses(self) -> list[str]:
        """Every goal that is not met, in words."""
        unmet = [text for r in self.rows for text in r.misses]
        for a in self.absent:
            if a.goal is not None:
                unmet.append(f"{a.name} {a.shape}, {a.allocator} malloc: not measured against {a.peer}: {a.reason}")
        return list(dict.fromkeys(unmet))

    @property
    def goals(self) -> int:
        """How many goals apply to what was asked for."""
        met_or_missed = sum((r.goal is not None) + (r.share_goal is not None) for r in self.rows)
        return met_or_missed + sum(a.goal is not None for a in self.absent)


def run(
    suites: Sequence[str],
    backend: str,
    *,
    peers: Sequence[str] = (),
    only: Sequence[str] = (),
    one_thread: bool = False,
    effort: Effort | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Found:
    """Measures the suites on `backend`.

    peers: only these (empty: all). only: cases whose name and shape contain one of these.
    one_thread: see machine.ONE_THREAD.
    """
    found = Found()
    effort = effort or (Effort(rounds=5, least=3) if one_thread else Effort())
    for suite in suites:
        part = Found()
        try:
            with Workers(SUITES[suite], backend, one_thread) as workers:
                _suite(workers, suite, backend, peers, only, effort, part, report)
        except KeyboardInterrupt:
            found.interrupted = True
        part.rows += growth(suite, part.rows, lambda n, s: _goal(backend, n, s, "linear growth", "default"))
        found.rows += part.rows
        found.absent += part.absent
        if found.interrupted:
            break
    return found


def _suite(
    workers: Workers,
    suite: str,
    backend: str,
    peers: Sequence[str],
    only: Sequence[str],
    effort: Effort,
    part: Found,
    report: Callable[[str], None],
) -> None:
    for index, case in enumerate(importlib.import_module(SUITES[suite]).cases()):
        if only and not any(text in f"{case.name} {case.shape}" for text in only):
            continue
        for allocator in case.allocators:
            before = len(part.rows)
            _one(workers, suite, backend, index, case, allocator, peers, effort, part)
            ratios = ", ".join(f"{r.ratio_median:.2f}x {r.peer}" for r in part.rows[before:])
            report(f"{suite}: {case.name} {case.shape}, {allocator} malloc: {ratios or 'not measured'}")


def _goal(backend: str, name: str, shape: str, peer: str, allocator: str) -> float | None:
    return goals.ratio(name, shape, peer, allocator) if backend == goals.BACKEND else None


def _one(
    workers: Workers,
    suite: str,
    backend: str,
    index: int,
    case: Case,
    allocator: str,
    peers: Sequence[str],
    effort: Effort,
    found: Found,
) -> None:
    def goal(peer: str) -> float | None:
        return _goal(backend, case.name, case.shape, peer, allocator)

    def gone(peer: str, reason: str) -> None:
        found.absent.append(Absent(suite, case.name, case.shape, peer, allocator, reason, goal(peer)))

    share_goal = goals.share(case.name, case.shape, case.ceiling, allocator) if backend == goals.BACKEND else None

    def compare(samples: Samples) -> list[Row]:
        work = CEILINGS[case.ceiling].work if case.ceiling else 0.0
        return rows(suite, case, allocator, samples, ceiling_work=work, goal=goal, share_goal=share_goal)

    candidates = case.under(allocator)
    compared = [n for n in candidates if n not in (OURS, case.minus) and (not peers or n in peers)]
    if not compared and not (case.budgets and not peers):
        return
    try:
        names = []
        for name in [OURS, *([case.minus] if case.minus else []), *compared, *([CEILING] if case.ceiling else [])]:
            try:
                workers.prepare(index, case, name, allocator)
                names.append(name)
            except Unavailable as error:
                if name in (OURS, case.minus):
                    for peer in [*compared, *case.budgets]:
                        gone(peer, f"{name}: {error}")
                    return
                gone(name, str(error))
        if case.quantity == "bytes":
            peaks = {n: workers.peak(n) for n in names}
            if peaks[OURS] <= 0:  # a call that needs no memory at all was not measured, whatever it was
                for peer in [*compared, *case.budgets]:
                    gone(peer, f"no memory was seen to be used ({peaks[OURS]:.0f} bytes)")
                return
            made = compare(Samples([peaks], 1, 1))
        elif case.quantity.startswith("counted"):
            made = compare(Samples([{n: workers.count(n) for n in names}], 1, 1))
        else:
            # The exponent of a series is a figure of its own, to which each of its points adds.
            bends = _goal(backend, "growth", case.series, "linear growth", allocator) is not None
            samples = interleave(names, workers, effort, lambda s: not bends and all(r.settled for r in compare(s)))
            made = compare(samples)
            for _ in range(1, LOOKS):
                if any(r.close for r in made):
                    samples += interleave(names, workers, effort)
                    made = compare(samples)
    except KeyboardInterrupt:
        workers.kill()  # a call under way may take minutes
        raise
    finally:
        workers.release()
    found.rows += made
