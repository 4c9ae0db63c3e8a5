"""How HAL measures: ours and its peers in turn, round after round, and the ratio within each round.

A ratio of two times taken milliseconds apart survives a noisy machine; a time does not. Rounds in which other processes
used the processors are dropped when enough others remain. Nothing here knows what is measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CLEAN_SHARE = 0.15
"""A round counts as clean if other processes used less than this share of one processor."""


@dataclass(frozen=True)
class Ceiling:
    """What the machine can do at most: `rate` per second of `unit` (FLOP or bytes), measured in the same run."""

    name: str
    rate: float
    unit: str


@dataclass(frozen=True)
class Row:
    """One comparison. ratio = the peer's time / ours (2.0 = twice as fast). share_of_ceiling: ours against the limit.

    seconds: our median. goal: the ratio `--check` demands. clean: rounds without other load / rounds taken.
    """

    name: str
    shape: str
    peer: str
    ratio_median: float
    ratio_min: float
    ratio_max: float
    seconds: float
    ceiling: str = ""
    share_of_ceiling: float | None = None
    goal: float | None = None
    clean: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def missed(self) -> bool:
        return self.goal is not None and self.ratio_median < self.goal


def _others() -> float:
    """Processor seconds used so far by everything on this machine except this process; 0 where unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    fields = [int(v) for v in stat.read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(fields) - fields[3] - fields[4]
    mine = os.times()
    return busy / os.sysconf("SC_CLK_TCK") - mine.user - mine.system


def calls_per_round(function: Callable[[], object], seconds: float) -> int:
    """How many calls take about `seconds`; also the warm-up."""
    function()
    start = time.perf_counter()
    function()
    once = max(time.perf_counter() - start, 1e-9)
    return max(1, round(seconds / once))


def interleave(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 9, seconds: float = 0.03
) -> tuple[list[dict[str, float]], int]:
    """Seconds per call of every candidate in every round, and how many of the rounds were clean.

    Every candidate runs once per round, in an order that rotates. Clean rounds only, if there are at least three.
    """
    counts = {name: calls_per_round(f, seconds) for name, f in candidates.items()}
    names = list(candidates)
    taken: list[tuple[dict[str, float], bool]] = []
    for i in range(rounds):
        before, wall = _others(), time.perf_counter()
        times = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            function, count = candidates[name], counts[name]
            start = time.perf_counter()
            for _ in range(count):
                function()
            times[name] = (time.perf_counter() - start) / count
        load = (_others() - before) / (time.perf_counter() - wall)
        taken.append((times, load < CLEAN_SHARE))
    clean = [times for times, is_clean in taken if is_clean]
    return (clean if len(clean) >= 3 else [times for times, _ in taken]), len(clean)


def compare(
    name: str,
    shape: str,
    ours: Callable[[], object],
    peers: Mapping[str, Callable[[], object]],
    *,
    work: float = 0.0,
    ceiling: Ceiling | None = None,
    goals: Mapping[str, float] | None = None,
    rounds: int = 9,
    seconds: float = 0.03,
) -> list[Row]:
    """One row per peer. work: FLOP or bytes of one call, for the share of the ceiling."""
    samples, clean = interleave({"ours": ours, **peers}, rounds=rounds, seconds=seconds)
    mine = statistics.median(s["ours"] for s in samples)
    share = work / mine / ceiling.rate if ceiling and work else None
    rows = []
    for peer in peers:
        ratios = sorted(s[peer] / s["ours"] for s in samples)
        rows.append(
            Row(
                name=name,
                shape=shape,
                peer=peer,
                ratio_median=statistics.median(ratios),
                ratio_min=ratios[0],
                ratio_max=ratios[-1],
                seconds=mine,
                ceiling=f"{ceiling.name} {ceiling.rate / 1e9:.0f} G{ceiling.unit}/s" if ceiling else "",
                share_of_ceiling=share,
                goal=(goals or {}).get(peer),
                clean=f"{clean}/{rounds}",
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    head = ("what", "shape", "peer", "ratio", "min..max", "goal", "ours", "of ceiling", "clean")
    body = [
        (
            r.name,
            r.shape,
            r.peer,
            f"{r.ratio_median:.2f}x",
            f"{r.ratio_min:.2f}..{r.ratio_max:.2f}",
            "" if r.goal is None else f"{'MISSED' if r.missed else 'ok'} {r.goal:g}x",
            f"{r.seconds * 1e6:.4g} us",
            "" if r.share_of_ceiling is None else f"{r.share_of_ceiling:.0%} of {r.ceiling}",
            r.clean,
        )
        for r in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in [head, *body])
