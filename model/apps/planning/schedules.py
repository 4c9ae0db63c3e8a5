"""The order of a pipeline's work under each schedule, and what follows from it: activations in flight, and the bubble.

The orders are those in which torch's schedules run the trainer's stages; `hal bench scaling` compares them with
recorded runs. Times are in units of one stage's forward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Forward pass; whole backward pass; its two halves, for the input and for the weights, which zero bubble separates."""


class Action(NamedTuple):
    """One piece of work: a key of DURATION, the stage, and the microbatch."""

    kind: str
    stage: int
    microbatch: int


@lru_cache(maxsize=4096)
def order(schedule: str, pp: int, chunks: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """What pipeline rank `rank` of `pp` does in one step. chunks: stages per rank. schedule: as in Plan."""
    if schedule == "none":
        return tuple(Action(kind, 0, mb) for mb in range(microbatches) for kind in "FB")
    if schedule == "zbv":
        return tuple(_zbv(pp, microbatches, rank))
    return tuple(_one_forward_one_backward(pp, chunks, microbatches, rank))


def _one_forward_one_backward(pp: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    """1F1B, interleaved if chunks > 1: Narayanan et al., arXiv 2104.04473, section 2.2, with torch's warm-up."""
    total = chunks * microbatches
    warmup = pp - rank if chunks == 1 else (chunks - 1) * pp + 2 * (pp - 1 - rank)
    warmup = min(total, warmup)

    def step(k: int, kind: str) -> Action:
        chunk, microbatch = k // pp % chunks, k // (pp * chunks) * pp + k % pp
        return Action(kind, (chunk if kind == "F" else chunks - 1 - chunk) * pp + rank, microbatch)

    yield from (step(k, "F") for k in range(warmup))
    for k in range(total):
        # Interleaved, a forward pass comes first in the steady state; plain, the warm-up holds one more of them.
        pair = [step(k, "B")] if k + warmup >= total else [step(k, "B"), step(k + warmup, "F")]
        yield from pair if chunks == 1 else reversed(pair)


def _zbv(pp: int, microbatches: int, rank: int) -> Iterator[Action]:
    """Zero bubble in V shape: Qi et al., arXiv 2401.10241, section 6. Stages `rank` and 2 pp - 1 - rank."""
    down, up = rank, 2 * pp - 1 - rank
    done = {(kind, stage): 0 for kind in "FIW" for stage in (down, up)}

    def do(kind: str, stage: int) -> Action:
        done[kind, stage] += 1
        return Action(kind, stage, done[kind, stage] - 1)

    yield from (do("F", down) for _ in range(2 * (pp - rank) - 1))
    for _ in range(rank):
        yield do("F", up)
        yield do("F", down)
    for _ in range(pp - rank):
        yield from (do(kind, up) for kind in "FIW")
    while done["F", up] < done["F", down] or done["F", down] < microbatches:
        if done["F", down] < microbatches:
            yield do("F", down)
        yield from (do(kind, down) for kind in "IW")
        yield from (do(kind, up) for kind in "FIW")
    for _ in range(rank):
        yield do("I", down)
        yield do("I", up)
    for _ in range(pp - rank):
        yield do("I", down)
        yield do("W", down)
    while done["W", up] < done["I", up]:
        yield do("W", up)
    while done["W", down] < done["I", down]:
        yield do("W", down)


def in_flight(actions: Sequence[Action]) -> list[dict[int, int]]:
    """How many microbatches each stage of a rank holds, between forward and the end of their backward pass, whenever
    that is no less than at any other time."""
    held: dict[int, int] = dict.fromkeys((a.stage for a in actions), 0)
    fullest: list[dict[int, int]] = []
    for kind, stage, _ in actions:
        if kind == "F":
            held[stage] += 1
            if not any(all(held[s] <= other[s] for s in held) for other in fullest):
                fullest = [o for o in fullest if not all(o[s] <= held[s] for s in held)] + [dict(held)]
        elif kind in "BW":
            held[stage] -= 1
    return fullest


@cache
def fullest(schedule: str, pp: int, chunks: int, microbatches: int, rank: int) -> list[dict[int, int]]:
    """`in_flight` of a rank. A schedule's first rounds are as full as any later one, so they are all that is looked
    at."""
    return in_flight(order(schedule, pp, chunks, min(microbatches, 3 * pp), rank))


def bubble(orders: Sequence[Sequence[Action]]) -> float:
    """Idle time / working time of a pipeline whose ranks do `orders`, each action as soon as its inputs are there.

    orders: by rank; recorded, or from `order`. Raises ValueError for orders that wait for each other forever.
    """
    last = max(a.stage for actions in orders for a in actions)
    waiting = [deque(actions) for actions in orders]
    clock = [0] * len(orders)
    done: dict[tuple[str, int, int] | None, int] = {None: 0}
    while any(waiting):
        before = len(done)
        for rank, queue in enumerate(waiting):
            while queue and (needed := _needs(queue[0], last)) in done:
                kind, stage, microbatch = queue.popleft()
                clock[rank] = max(clock[rank], done[needed]) + DURATION[kind]
                done["I" if kind == "B" else kind, stage, microbatch] = clock[rank]
        if len(done) == before:
            raise ValueError(f"these orders wait for each other: {[queue[0] for queue in waiting if queue]}")
    work = max(sum(DURATION[a.kind] for a in actions) for actions in orders)
    return max(clock) / work - 1.0


def _needs(action: Action, last: int) -> tuple[str, int, int] | None:
    """What must have been done before; a whole backward pass counts as that for the input."""
    kind, stage, microbatch = action
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage > 0 else None
    if kind == "W":
        return "I", stage, microbatch
    return ("I", stage + 1, microbatch) if stage < last else ("F", stage, microbatch)


def bubble_formula(schedule: str, pp: int, chunks: int, microbatches: int) -> float:
    """Idle time / working time of one step, all stages being equal.

    1F1B (p-1)/m and interleaved (p-1)/(v m): Narayanan et al., section 2.2. Zero bubble: what is left of it in a
    trainer whose ranks wait for each other at the end of a step, (p-1) forward passes of half-sized stages in 6 m.
    """
    if schedule == "none":
        return 0.0
    return (pp - 1) / (6 * microbatches if schedule == "zbv" else chunks * microbatches)
