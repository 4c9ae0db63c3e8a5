"""What is observed of a run beside its results: profiles, times of phases, slow ranks, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..config.schema import Config
from .profiling import Profiling
from .run_log import NullRunLog, RunLog
from .step_result import StepResult
from .step_timers import StepTimers
from .trainer import Trainer


class Observed:
    """The trainer enters `step` around each step, and `after` is called with its result, on all ranks."""

    def __init__(self, config: Config, trainer: Trainer, folder: Path, report: RunLog | NullRunLog) -> None:
        self._profiling = Profiling(config, trainer, folder, report.write_line)
        self._timers = StepTimers(config, trainer, report)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures a step."""
        with self._timers.measuring(), self._profiling.step():
            yield

    def finish(self) -> None:
        """Ends what is still measured when the last step is done."""
        self._profiling.finish()

    def after(self, result: StepResult) -> None:
        """Logs what is due after a step."""
        self._timers.step(result)
