"""Chrome's trace format ("Trace Event Format"), which chrome://tracing and Perfetto show, from recorded spans.

One process per rank and one row per thread; collectives in flight have a row of their own, since they overlap.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from ..spans import Span


def chrome_trace(recorded: Sequence[Span], rank: int, offset: int = 0) -> dict[str, Any]:
    """The trace as JSON values. offset: nanoseconds to add to this rank's clock."""
    threads: dict[int, int] = {}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
    ]
    for span in recorded:
        row = threads.setdefault(span.thread, len(threads))
        facts = {name: value for name, value in span.facts.items() if name != "part" or value is not True}
        common = {"pid": rank, "tid": row, "cat": span.kind, "args": facts}
        events.append(
            {
                "ph": "X",
                "name": title(span),
                "ts": _us(span.begin + offset),
                "dur": _us(span.end - span.begin),
                **common,
            }
        )
    for number, (first, last) in enumerate(in_flight(recorded)):
        # Asynchronous events: a viewer draws those that overlap below one another.
        common = {"name": first.name, "cat": "in flight", "pid": rank, "tid": 0, "id": f"{rank}.{number}"}
        events.append({"ph": "b", "ts": _us(first.begin + offset), **common})
        events.append({"ph": "e", "ts": _us(last.end + offset), **common})
    for row in threads.values():
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": f"thread {row}"}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def title(span: Span) -> str:
    """What a viewer shows of a span."""
    if span.kind == "op":
        backward = ", backward" if span.facts["direction"] == "backward" else ""
        return f"{span.name} ({span.facts['impl']}){backward}"
    if span.kind == "communication" and span.facts["part"] != "blocking":
        return f"{span.name}, {span.facts['part']}"
    return span.name


def in_flight(recorded: Sequence[Span]) -> list[tuple[Span, Span]]:
    """(start, wait) of each asynchronous collective. Those of one name and group are waited for in their order."""
    started: dict[tuple[str, str], deque[Span]] = defaultdict(deque)
    pairs = []
    for span in recorded:
        if span.kind != "communication":
            continue
        key = span.name, span.facts["group"]
        if span.facts["part"] == "start":
            started[key].append(span)
        elif span.facts["part"] == "wait" and started[key]:
            pairs.append((started[key].popleft(), span))
    return pairs


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000.0
