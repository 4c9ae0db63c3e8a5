"""Named intervals of time of this process: calls of ops, collectives, and phases of a training step.

A span is delivered to every listener when it ends. Without a listener nothing is measured, and a span costs one
comparison, so the code that names spans need not know whether somebody profiles.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Span:
    """kind: "op", "communication", "phase" or "step". begin, end: time.perf_counter_ns(). thread: of the `threading`
    module. facts: what is known of it besides."""

    kind: str
    name: str
    begin: int
    end: int
    thread: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Its duration."""
        return (self.end - self.begin) * 1e-9


listeners: list[Callable[[Span], None]] = []
"""Called with every span that ends, in the thread in which it ends."""


@contextlib.contextmanager
def listening(listener: Callable[[Span], None]) -> Iterator[None]:
    """Adds a listener for the duration of a `with` block."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


@contextlib.contextmanager
def span(kind: str, name: str, **facts: Any) -> Iterator[None]:
    """Measures a `with` block, if anybody listens; also one that raises."""
    if not listeners:
        yield
        return
    begin = time.perf_counter_ns()
    try:
        yield
    finally:
        deliver(kind, name, begin, facts)


def deliver(kind: str, name: str, begin: int, facts: Mapping[str, Any]) -> None:
    """Delivers a span that began at `begin` and ends now."""
    done = Span(kind, name, begin, time.perf_counter_ns(), threading.get_ident(), facts)
    for listener in list(listeners):
        listener(done)
