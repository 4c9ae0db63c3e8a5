"""The measuring engine: runs ours and its peers alternately in rounds, and computes the ratio within each round.

On a noisy machine, the ratio of two times taken milliseconds apart is stable, whereas a time is not. Rounds in which
other processes used the processors are dropped if enough other rounds remain. The engine is independent of what is
measured, and where.
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
MIN_CLEAN = 3
"""If there are at least this many clean rounds, only these count; otherwise all rounds count."""
ABOVE, BELOW, LOOKS = 0.05, 0.2, 3
"""A figure less than ABOVE over its goal or less than BELOW under it is measured again, up to LOOKS times in total; all
rounds count. That happens after all other cases of the run, because the conditions on a virtual machine last for
minutes: the rate of a copy changed between 22 and 46 GB/s."""
FAR = 0.1
"""A case is settled once `least` clean rounds have each met all of its goals by more than this share."""
CEILING = "ceiling"
"""The candidate that measures the machine itself; it is interleaved like the others."""
UNIT_OF = {"seconds": "s", "bytes": "B", "counted bytes": "B", "counted share": ""}
"""The unit of a row by its case's quantity."""


class Meter(Protocol):
    """Runs candidates by name and measures their time and memory."""

    def run(self, name: str, n: int) -> float:
        """Total seconds of n calls."""

    def peak(self, name: str) -> float:
        """Bytes that one call adds to the resident memory at its peak."""

    def count(self, name: str) -> float:
        """The number that one call returns."""

    def start_round(self) -> None:
        """Restarts the count of `other_load`."""

    def other_load(self) -> float:
        """Share of one processor that other processes have used since `start_round`."""


@dataclass(frozen=True)
class Effort:
    """The duration of the measurement of a case.

    rounds: as many as fit into `budget` seconds, but not more than this (up to twice as many while fewer than MIN_CLEAN
        are clean) and not fewer than `least`. They are short, because the rate of a virtual machine changes within
        tenths of a second: with 9 rounds of 60 ms, five medians of one case ranged from 67 to 86 % of the ceiling, with
        30 rounds of 15 ms from 68 to 74 %.
    seconds: per candidate and round.
    warm: seconds of calls that are not timed, before those of each round. The scheduler needs some milliseconds to give
        each thread that slept a processor of its own, and OpenMP's threads of the candidate before wait actively for a
        few. Calls that take longer than that begin cold.
    """

    rounds: int = 15
    least: int = 7
    seconds: float = 0.02
    warm: float = 0.012
    budget: float = 8.0


@dataclass(frozen=True)
class Row:
    """One comparison. ratio = the peer's time (or bytes) / ours; 2.0 means that ours is twice as fast.

    ours: our median in `unit`. share_of_ceiling, share_min: median and minimum of our rate / the ceiling's in the same
    rounds. goal, share_goal: `--check` requires that one of the two is reached. clean: the number of `rounds` without
    other load (see MIN_CLEAN).
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

    def _margins(self, ratio: float, share: float | None) -> list[float]:
        """Each figure that has a goal, as a multiple of its goal."""
        pairs = ((ratio, self.goal), (share, self.share_goal))
        return [value / goal for value, goal in pairs if goal is not None and value is not None]

    @property
    def wanted(self) -> bool:
        """Whether the row has a goal."""
        return self.goal is not None or self.share_goal is not None

    @property
    def met(self) -> bool:
        """Whether the ratio or the share of the ceiling, whichever has a goal, reaches it; True without goals."""
        # NaN compares as less, so that it misses its goal.
        return not self.wanted or any(m >= 1.0 for m in self._margins(self.ratio_median, self.share_of_ceiling))

    @property
    def miss(self) -> str:
        """A sentence with all figures that have goals if none of them reaches its goal, else ""."""
        if self.met:
            return ""
        figures = []
        if self.goal is not None:
            figures.append(f"{self.ratio_median:.2f}x {self.peer}, goal {self.goal:g}x")
        if self.share_goal is not None:
            share = "no share" if self.share_of_ceiling is None else f"{self.share_of_ceiling:.0%}"
            figures.append(f"{share} of {self.ceiling}, goal {self.share_goal:.0%}")
        return f"{self.name} {self.shape}, {self.allocator} malloc: {'; and '.join(figures)}"

    @property
    def close(self) -> bool:
        """Whether the figure that is nearest to meeting its goal is so close to it, on either side, that noise may
        determine the verdict."""
        best = max(self._margins(self.ratio_median, self.share_of_ceiling), default=0.0)
        return self.wanted and 1.0 - BELOW <= best <= 1.0 + ABOVE

    @property
    def settled(self) -> bool:
        """Whether one figure met its goal by more than FAR in every round, so that more rounds would not change the
        verdict."""
        return not self.wanted or any(m > 1.0 + FAR for m in self._margins(self.ratio_min, self.share_min))


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
    """Seconds (or bytes) per call of every candidate.

    rounds: one entry per round that counts. clean, taken: the numbers of clean rounds and of all rounds.
    """

    rounds: list[dict[str, float]]
    clean: int
    taken: int

    def __add__(self, other: Samples) -> Samples:
        """All rounds of both; if only one of the two has enough clean rounds, the other's rounds do not count."""
        parts = [s for s in (self, other) if s.clean >= MIN_CLEAN] or [self, other]
        return Samples([r for s in parts for r in s.rounds], self.clean + other.clean, self.taken + other.taken)


def sample(
    case: Case,
    names: Sequence[str],
    meter: Meter,
    effort: Effort,
    settled: Callable[[Samples], bool] = lambda samples: False,
) -> Samples:
    """Measures the candidates `names` of `case`: times in interleaved rounds, memory and counts once.

    A count is the same for every call. A peak can be measured only once per process, because memory that the first call
    leaves allocated would not be counted for a second call.
    """
    if case.quantity == "seconds":
        return interleave(names, meter, effort, settled)
    measure = meter.peak if case.quantity == "bytes" else meter.count
    return Samples([{name: measure(name) for name in names}], 1, 1)


def interleave(
    names: Sequence[str], meter: Meter, effort: Effort, settled: Callable[[Samples], bool] = lambda samples: False
) -> Samples:
    """Times every candidate once per round. The order rotates, so that no candidate always follows the same one.

    settled: called after `effort.least` clean rounds and after each further one; true ends the measurement.
    """
    calls, warm, seconds_per_round = {}, {}, 0.0
    for name in names:
        meter.run(name, 1)  # the first call may compile or allocate
        seconds = max(meter.run(name, 1), 1e-9)
        if seconds < effort.seconds / 4:  # a single short call is a poor estimate of the mean of several calls
            n = max(1, math.ceil(effort.seconds / 4 / seconds))
            seconds = meter.run(name, n) / n
        calls[name] = max(1, round(effort.seconds / seconds))
        warm[name] = round(effort.warm / seconds)
        seconds_per_round += (warm[name] + calls[name]) * seconds
    wanted = max(effort.least, min(effort.rounds, int(effort.budget / seconds_per_round)))
    rounds: list[tuple[dict[str, float], bool]] = []  # seconds per call, and whether the round was clean
    clean: list[dict[str, float]] = []
    while len(rounds) < wanted or (len(rounds) < 2 * wanted and len(clean) < MIN_CLEAN):
        first = len(rounds) % len(names)
        meter.start_round()
        times = {}
        for name in [*names[first:], *names[:first]]:
            if warm[name]:
                meter.run(name, warm[name])
            times[name] = meter.run(name, calls[name]) / calls[name]
        rounds.append((times, meter.other_load() < CLEAN_SHARE))
        clean = [times for times, is_clean in rounds if is_clean]
        if len(clean) >= max(effort.least, MIN_CLEAN) and settled(Samples(clean, len(clean), len(rounds))):
            break
    counted = clean if len(clean) >= MIN_CLEAN else [times for times, _ in rounds]
    return Samples(counted, len(clean), len(rounds))


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

    def net(times: Mapping[str, float], name: str = OURS) -> float:
        return times[name] - times[case.minus] if case.minus else times[name]

    shares = []
    if case.ceiling and case.work and CEILING in samples.rounds[0]:
        # A rate is work / time; ours is divided by the ceiling's in the same round.
        shares = [(case.work / net(t)) / (ceiling_work / t[CEILING]) for t in samples.rounds]
    peers = [n for n in samples.rounds[0] if n not in (OURS, CEILING, case.minus)]
    goals = {peer: goal(peer) for peer in [*peers, *case.budgets]}
    ratios_count = any(wanted is not None for wanted in goals.values())
    result: list[Row] = []
    for peer, wanted in goals.items():
        budget = case.budgets.get(peer)
        # Noise can make an overhead zero or negative. The ratio is limited then, because JSON cannot represent
        # infinity.
        ratios = sorted((net(t, peer) if budget is None else budget) / max(net(t), 1e-12) for t in samples.rounds)
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
                ours=statistics.median(net(t) for t in samples.rounds),
                unit=UNIT_OF[case.quantity],
                ceiling=case.ceiling,
                share_of_ceiling=statistics.median(shares) if shares else None,
                share_min=min(shares, default=None),
                goal=wanted,
                # The share does not depend on the peer: it can take the place of each ratio that has a goal, and
                # counts once, in the first row, for a case without such ratios.
                share_goal=share_goal if wanted is not None or not (ratios_count or result) else None,
                clean=samples.clean,
                rounds=samples.taken,
                series=case.series,
                x=case.x,
            )
        )
    return result


def growth(suite: str, measured: Sequence[Row], goal: Callable[[str, str], float | None]) -> list[Row]:
    """One row per series with a goal: 1 / the exponent p of time ~ x^p, by least squares on the logarithms."""
    result = []
    for series in dict.fromkeys(r.series for r in measured if r.series):
        wanted = goal("growth", series)
        points = {r.x: r for r in measured if r.series == series}
        if wanted is None or len(points) < 3:
            continue
        exponent = slope([(x, r.ours) for x, r in points.items()])
        ratio = 1.0 / exponent
        result.append(
            Row(
                suite=suite,
                name="growth",
                shape=f"{series} {min(points):g}..{max(points):g}: time ~ x^{exponent:.2f}",
                peer="linear growth",
                allocator=next(iter(points.values())).allocator,
                ratio_median=ratio,
                ratio_min=ratio,
                ratio_max=ratio,
                ours=sum(r.ours for r in points.values()),
                goal=wanted,
                clean=sum(r.clean for r in points.values()),
                rounds=sum(r.rounds for r in points.values()),
            )
        )
    return result


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent p of the best fit y ~ x^p."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    return statistics.linear_regression(xs, ys).slope
