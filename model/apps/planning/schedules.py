"""Pipeline schedules: the order of a rank's actions, the microbatches in flight and the bubble that follow from it.

The orders are those of torch's schedules for the trainer's stages; `hal bench scaling` compares them with recorded
runs. Times are in units of one stage's forward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}
"""F: forward; B: backward; I and W: its halves for the input and for the weights, which zero bubble separates."""


class Action(NamedTuple):
    """kind: a key of DURATION."""

    kind: str
    stage: int
    microbatch: int


@lru_cache(maxsize=4096)
def order(schedule: str, pp: int, chunks: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """The actions of pipeline rank `rank` in a step. chunks: stages per rank. schedule: as in ParallelLayout."""
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
        # In the steady state, interleaved 1F1B runs the forward pass first. Plain 1F1B runs the backward pass first,
        # since its warm-up has one more forward pass.
        pair = [step(k, "B")] if k + warmup >= total else [step(k, "B"), step(k + warmup, "F")]
        yield from pair if chunks == 1 else reversed(pair)


def _zbv(pp: int, microbatches: int, rank: int) -> Iterator[Action]:
    """Zero bubble with V-shaped stages: Qi et al., arXiv 2401.10241, section 6. Stages `rank` and 2 pp - 1 - rank."""
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
    """The Pareto-maximal numbers of microbatches in flight per stage of a rank, over all moments of a step.

    A microbatch is in flight from its forward pass to the end of its backward pass.
    """
    counts: dict[int, int] = dict.fromkeys((a.stage for a in actions), 0)
    fullest: list[dict[int, int]] = []
    for kind, stage, _ in actions:
        if kind == "F":
            counts[stage] += 1
            if not any(all(counts[s] <= other[s] for s in counts) for other in fullest):
                fullest = [o for o in fullest if not all(o[s] <= counts[s] for s in counts)] + [dict(counts)]
        elif kind in "BW":
            counts[stage] -= 1
    return fullest


@cache
def fullest(schedule: str, pp: int, chunks: int, microbatches: int, rank: int) -> list[dict[int, int]]:
    """`in_flight` of a rank. The first rounds of a schedule reach its maximum, so only these are simulated."""
    return in_flight(order(schedule, pp, chunks, min(microbatches, 3 * pp), rank))


def bubble(orders: Sequence[Sequence[Action]]) -> float:
    """Idle time / working time of a pipeline whose ranks execute `orders`, each action as soon as its inputs are ready.

    orders: by rank; recorded, or from `order`. Raises ValueError if they deadlock.
    """
    last = max(a.stage for actions in orders for a in actions)
    queues = [deque(actions) for actions in orders]
    clock = [0] * len(orders)
    done: dict[tuple[str, int, int] | None, int] = {None: 0}
    while any(queues):
        before = len(done)
        for rank, queue in enumerate(queues):
            while queue and (needed := _needs(queue[0], last)) in done:
                kind, stage, microbatch = queue.popleft()
                clock[rank] = max(clock[rank], done[needed]) + DURATION[kind]
                done["I" if kind == "B" else kind, stage, microbatch] = clock[rank]
        if len(done) == before:
            raise ValueError(f"these orders deadlock: {[queue[0] for queue in queues if queue]}")
    work = max(sum(DURATION[a.kind] for a in actions) for actions in orders)
    return max(clock) / work - 1.0


def _needs(action: Action, last: int) -> tuple[str, int, int] | None:
    """The action that an action depends on. A complete backward pass B counts as I."""
    kind, stage, microbatch = action
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage > 0 else None
    if kind == "W":
        return "I", stage, microbatch
    return ("I", stage + 1, microbatch) if stage < last else ("F", stage, microbatch)


def bubble_formula(schedule: str, pp: int, chunks: int, microbatches: int) -> float:
    """Idle time / working time of one step, for equal stages.

    1F1B (p-1)/m and interleaved (p-1)/(v m): Narayanan et al., section 2.2. Zero bubble: the ranks synchronise at the
    end of a step, which leaves (p-1) forward passes of half-sized stages in 6 m.
    """
    if schedule == "none":
        return 0.0
    return (pp - 1) / (6 * microbatches if schedule == "zbv" else chunks * microbatches)
