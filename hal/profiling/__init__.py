"""What a program spends its time on, in HAL's terms: ops with their implementations, collectives, phases of a step.

>>> from hal.profiling import Recorder                        # doctest: +SKIP
>>> with Recorder(hal.backend()) as recorder: step()          # doctest: +SKIP
>>> print(recorder.table())                                   # doctest: +SKIP

ops.py measures the calls, work.py counts their operations and bytes, ceilings.py measures what the device can do,
summary.py and trace.py make a table and a Chrome trace of the spans, clocks.py and waiting.py put the spans of several
ranks on one clock, memory.py records which tensors are alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import spans
from ..core.dispatch import backend as _backend
from .recorder import Recorder as Recorder


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of a step: a range of the backend's profiler, and a span for those who listen."""
    with _backend().profile_range(name), spans.span("phase", name):
        yield
