"""How HAL measures: ours and its peers in turn, round after round, and the ratio within each round.

A ratio of two times taken milliseconds apart survives a noisy machine; a time does not. Rounds in which other processes
used the processors are dropped when enough others remain. Nothing here knows what is measured, or where it runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .case import OURS, Case

CLEAN_SHARE = 0.15
"""A round counts as clean if other processes used less than this share of one processor."""
CLOSE, LOOKS = 0.05, 3
"""A figure within this share of its goal is measured again, up to so many times in all; all rounds count."""
FAR = 0.1
"""A case is settled once `least` clean rounds each met every goal of it by more than this share, or it has none."""
CEILING = "ceiling"
"""The candidate that measures the machine itself; it is interleaved like the others."""


UNITS = {"seconds": "s", "bytes": "B", "counted bytes": "B", "counted share": ""}
"""The unit of a row by its case's quantity."""


class Clock(Protocol):
    """Whatever can run candidates: `run(name, n)` makes n calls and returns the seconds they took together."""

    def run(self, name: str, n: int) -> float: ...

    def restart(self) -> None: ...

    def share(self) -> float: ...


@dataclass(frozen=True)
class Effort:
    """How long a case is measured: rounds (up to twice as many while clean ones are scarce), seconds per candidate and
    round, and the seconds after which `least` rounds are enough."""

    rounds: int = 9
    least: int = 5
    seconds: float = 0.06
    budget: float = 8.0


@dataclass(frozen=True)
class Row:
    """One comparison. ratio = the peer's time (or bytes) / ours: 2.0 = twice as fast.

    ours: our median in `unit`. share_of_ceiling, share_min: our rate / the ceiling's, in the same rounds; median and
    smallest. goal, share_goal: what `--check` demands. clean: how many of `rounds` had no other load; only those count
    if there are three.
    """

    suite: str
    name: str
    shape: str
    peer: str
    allocator: str
    ratio_median: float
    ratio_min: float
    ratio_max: float
    ours: float
    unit: str = "s"
    ceiling: str = ""
    share_of_ceiling: float | None = None
    share_min: float | None = None
    goal: float | None = None
    share_goal: float | None = None
    clean: int = 0
    rounds: int = 0
    series: str = ""
    x: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def misses(self) -> list[str]:
        """What is below its goal, in words; empty = nothing."""
        found = []
        where = f"{self.name} {self.shape}, {self.allocator} malloc"
        if self.goal is not None and not self.ratio_median >= self.goal:
            found.append(f"{where}: {self.ratio_median:.2f}x {self.peer}, goal {self.goal:g}x")
        if self.share_goal is not None and not (self.share_of_ceiling or 0.0) >= self.share_goal:
            found.append(f"{where}: {self.share_of_ceiling or 0.0:.0%} of {self.ceiling}, goal {self.share_goal:.0%}")
        return found

    @property
    def close(self) -> bool:
        """Whether a figure is so near its goal, on either side, that chance may decide."""
        pairs = ((self.ratio_median, self.goal), (self.share_of_ceiling, self.share_goal))
        return any(v is not None and g is not None and abs(v - g) <= CLOSE * g for v, g in pairs)

    @property
    def settled(self) -> bool:
        """Whether every round met the goals by more than FAR, so that more rounds would decide nothing."""
        pairs = ((self.ratio_min, self.goal), (self.share_min, self.share_goal))
        return all(g is None or (v is not None and v > (1.0 + FAR) * g) for v, g in pairs)


@dataclass(frozen=True)
class Absent:
    """A comparison that could not be made, and why. It fails `--check` if a goal was set for it."""

    suite: str
    name: str
    shape: str
    peer: str
    allocator: str
    reason: str
    goal: float | None = None


@dataclass(frozen=True)
class Samples:
    """Seconds per call of every candidate, one entry per round that counts; how many rounds were clean, and all."""

    rounds: list[dict[str, float]]
    clean: int
    taken: int

    def __add__(self, more: Samples) -> Samples:
        """Both, except that a part without three clean rounds gives way to one that has them."""
        parts = [s for s in (self, more) if s.clean >= 3] or [self, more]
        return Samples([r for s in parts for r in s.rounds], self.clean + more.clean, self.taken + more.taken)


def interleave(
    names: Sequence[str], clock: Clock, effort: Effort, settled: Callable[[Samples], bool] = lambda samples: False
) -> Samples:
    """Runs every candidate once per round, in an order that rotates. Clean rounds only, if there are at least three.

    settled: asked after `effort.least` clean rounds and after each more; true ends the measurement.
    """
    counts, spent = {}, 0.0
    for name in names:
        clock.run(name, 1)  # the warm-up
        once = max(clock.run(name, 1), 1e-9)
        if once < effort.seconds / 4:  # a single short call says little about the next thousand
            n = max(1, math.ceil(effort.seconds / 4 / once))
            once = clock.run(name, n) / n
        counts[name] = max(1, round(effort.seconds / once))
        spent += counts[name] * once
    wanted = max(effort.least, min(effort.rounds, int(effort.budget / spent)))
    taken: list[tuple[dict[str, float], bool]] = []
    while len(taken) < wanted or (len(taken) < 2 * wanted and sum(ok for _, ok in taken) < 3):
        turn = len(taken) % len(names)
        clock.restart()
        times = {name: clock.run(name, counts[name]) / counts[name] for name in [*names[turn:], *names[:turn]]}
        taken.append((times, clock.share() < CLEAN_SHARE))
        clean = [times for times, ok in taken if ok]
        if len(clean) >= max(effort.least, 3) and settled(Samples(clean, len(clean), len(taken))):
            break
    clean = [times for times, ok in taken if ok]
    return Samples(clean if len(clean) >= 3 else [times for times, _ in taken], len(clean), len(taken))


def rows(
    suite: str,
    case: Case,
    allocator: str,
    samples: Samples,
    *,
    ceiling_work: float = 0.0,
    goal: Callable[[str], float | None] = lambda peer: None,
    share_goal: float | None = None,
) -> list[Row]:
    """One row per peer and per budget. ceiling_work: FLOP or bytes of one call of the candidate `CEILING`."""

    def ours(times: Mapping[str, float]) -> float:
        return times[OURS] - times[case.minus] if case.minus else times[OURS]

    mine = statistics.median(ours(t) for t in samples.rounds)
    shares = []
    if case.ceiling and case.work and CEILING in samples.rounds[0]:
        shares = [case.work / ours(t) * t[CEILING] / ceiling_work for t in samples.rounds]
    peers = [n for n in samples.rounds[0] if n not in (OURS, CEILING, case.minus)]
    result = []
    for peer in [*peers, *case.budgets]:
        budget = case.budgets.get(peer)
        # An overhead that noise makes zero or negative is within any budget; infinity would not survive JSON.
        ratios = sorted((t[peer] if budget is None else budget) / max(ours(t), 1e-12) for t in samples.rounds)
        result.append(
            Row(
                suite=suite,
                name=case.name,
                shape=case.shape,
                peer=peer,
                allocator=allocator,
                ratio_median=statistics.median(ratios),
                ratio_min=ratios[0],
                ratio_max=ratios[-1],
                ours=mine,
                unit=UNITS[case.quantity],
                ceiling=case.ceiling,
                share_of_ceiling=statistics.median(shares) if shares else None,
                share_min=min(shares, default=None),
                goal=goal(peer),
                share_goal=None if result else share_goal,  # it is about ours, not about the peer: said once
                clean=samples.clean,
                rounds=samples.taken,
                series=case.series,
                x=case.x,
            )
        )
    return result


def growth(suite: str, found: Sequence[Row], goal: Callable[[str, str], float | None]) -> list[Row]:
    """One row per series with a goal: 1 / the exponent p of time ~ x^p, by least squares on the logarithms."""
    result = []
    for series in dict.fromkeys(r.series for r in found if r.series):
        wanted = goal("growth", series)
        points = {r.x: r for r in found if r.series == series}
        if wanted is None or len(points) < 3:
            continue
        exponent = slope([(x, r.ours) for x, r in points.items()])
        shape = f"{series} {min(points):g}..{max(points):g}: time ~ x^{exponent:.2f}"
        clean, taken = sum(r.clean for r in points.values()), sum(r.rounds for r in points.values())
        some = next(iter(points.values()))
        ratio = 1.0 / exponent
        result.append(
            Row(
                suite,
                "growth",
                shape,
                "linear growth",
                some.allocator,
                ratio,
                ratio,
                ratio,
                sum(r.ours for r in points.values()),
                goal=wanted,
                clean=clean,
                rounds=taken,
            )
        )
    return result


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent p of the best fit y ~ x^p."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    return statistics.linear_regression(xs, ys).slope
