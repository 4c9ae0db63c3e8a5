"""Collectives of several ranks on one clock, and the time that each rank waited for others to arrive.

A rank waits in a collective from its own arrival until the last rank arrives; the rest of its blocked time is data
transfer. Collectives of a group are matched by their order, which is the same on all of its ranks.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.contract import Comm
from ..spans import Span

_ROUNDS = 9
"""Barriers whose median difference is taken, so that a few that a rank left late do not count."""


def clock_offset(world: Comm) -> int:
    """Nanoseconds to add to this rank's perf_counter_ns() so that it agrees with that of rank 0. All ranks call it.

    All ranks leave a barrier at about the same time (on one machine within some 0.1 ms); the median of the differences
    over several barriers is taken.
    """
    if world.size == 1:
        return 0
    differences = []
    for _ in range(_ROUNDS):
        world.barrier()
        left = torch.tensor([time.perf_counter_ns()], dtype=torch.int64, device=world.device)
        times = world.all_gather(left).tolist()
        differences.append(times[0] - times[world.rank])
    return int(statistics.median(differences))


@dataclass(frozen=True)
class Collective:
    """One collective on one rank. number: its place among those of its group. arrived: when the rank started it.
    blocked: (begin, end) of the time in which the rank could do nothing else; all in nanoseconds on the common clock.
    size: bytes of the rank's input."""

    group: str
    number: int
    name: str
    size: int
    arrived: int
    blocked: tuple[int, int]


def collectives(recorded: Sequence[Span], offset: int = 0) -> list[Collective]:
    """The collectives of a rank's spans, with `offset` (see `clock_offset`) added to their times.

    Exchanges are not counted, because their partners differ from rank to rank.
    """
    numbers: dict[str, int] = defaultdict(int)
    started: dict[tuple[str, str], list[tuple[int, Span]]] = defaultdict(list)
    result = []

    def add(number: int, first: Span, last: Span) -> None:
        group, size = first.facts["group"], first.facts["bytes"]
        blocked = (last.begin + offset, last.end + offset)
        result.append(Collective(group, number, first.name, size, first.begin + offset, blocked))

    # In the order in which they began: a span is recorded when it ends.
    for span in sorted((s for s in recorded if s.kind == "communication"), key=lambda s: s.begin):
        if span.name == "exchange":
            continue
        group, part = span.facts["group"], span.facts["part"]
        if part == "wait":
            if started[span.name, group]:
                number, first = started[span.name, group].pop(0)
                add(number, first, span)
            continue
        number = numbers[group]
        numbers[group] += 1
        if part == "start":
            started[span.name, group].append((number, span))
        else:
            add(number, span, span)
    return result


def waiting(ranks: Mapping[int, Sequence[Collective]]) -> dict[int, list[tuple[Collective, float]]]:
    """For each rank, its collectives with the seconds that it was blocked before the last of these ranks arrived."""
    last: dict[tuple[str, int], int] = {}
    for collectives_of_rank in ranks.values():
        for c in collectives_of_rank:
            key = c.group, c.number
            last[key] = max(last.get(key, c.arrived), c.arrived)

    def waited(c: Collective) -> float:
        begin, end = c.blocked
        return max(0, min(end, last[c.group, c.number]) - begin) * 1e-9

    return {rank: [(c, waited(c)) for c in own] for rank, own in ranks.items()}


def as_json(collectives: Sequence[Collective]) -> list[list[Any]]:
    """Rows [group, number, name, bytes, arrived, begin, end]."""
    return [[c.group, c.number, c.name, c.size, c.arrived, *c.blocked] for c in collectives]
