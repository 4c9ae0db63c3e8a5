"""--profile: records some steps of some ranks, and writes a table of ops, traces, and the life of tensors.

The folder profile of a run holds, for each profiled rank N, rank-N.json (what `hal report` shows), rank-N.trace.json
(Chrome's format), with --use-pytorch-profiler what Backend.profiler writes, and with --record-memory-history a snapshot
for torch's memory viewer. Outside of the profiled steps nothing is recorded, and nothing costs time.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import hal
from hal import spans
from hal.profiling import Recorder
from hal.profiling.ceilings import measure
from hal.profiling.memory import MemoryHistory
from hal.profiling.summary import blocked_seconds, rows
from hal.profiling.trace import chrome_trace
from hal.profiling.waiting import as_json, clock_offset, collectives
from hal.spans import Span

from ..common.atomic_files import make_folder, write_text
from ..config.flops import flops_per_token
from ..config.schema import Config
from .optimizer import local
from .trainer import Trainer

_POINTS = 2000
"""Points of a memory curve that are kept for the report."""


class Profiling:
    """The profile of a run. Without --profile, it does nothing."""

    def __init__(self, config: Config, trainer: Trainer, folder: Path, write_line: Callable[[str], None]) -> None:
        """folder: that of the run. write_line: prints a line to the run's log."""
        self.config, self.trainer, self.folder, self._write_line = config, trainer, folder / "profile", write_line
        self._rank = trainer.world.rank
        self._mine = config.profile and str(self._rank) in config.profile_ranks
        self._stack: contextlib.ExitStack | None = None
        self._recorder: Recorder | None = None
        self._memory: MemoryHistory | None = None
        self._offset, self._steps = 0, list[tuple[int, int, int]]()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each step of the trainer; all ranks enter it."""
        c, done = self.config, self.trainer.iteration
        if not (c.profile and c.profile_step_start <= done < c.profile_step_end):
            yield
            return
        if self._stack is None:
            self._start()
        try:
            with contextlib.ExitStack() as of_step:  # not of what is done between steps, such as an evaluation
                if self._recorder is not None:
                    of_step.enter_context(self._recorder)
                    of_step.enter_context(spans.listening(self._note_gradients))
                begin = time.perf_counter_ns()
                with spans.span("step", f"iteration {done + 1}"):
                    yield
                self._steps.append((done + 1, begin, time.perf_counter_ns()))
        except BaseException:
            self.close()
            raise
        if self.trainer.iteration >= c.profile_step_end:
            self.finish()

    def _start(self) -> None:
        """Starts to record. All ranks call it, because their clocks are compared."""
        self._stack = contextlib.ExitStack()
        self._offset = clock_offset(self.trainer.world)
        if not self._mine:
            return
        backend = hal.backend()
        make_folder(self.folder)
        if self.config.use_pytorch_profiler:
            self._stack.enter_context(backend.profiler(str(self.folder), f"rank-{self._rank}"))
        if self.config.record_memory_history:
            optimizer = self.trainer.optimizer
            self._memory = MemoryHistory()
            self._memory.mark("weights", (local(p) for p in optimizer.model.values()))
            state = [*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
            masters = [*optimizer.main.values()] if optimizer.low else []
            self._memory.mark("optimizer", [*state, *masters])
            self._stack.enter_context(self._memory)
        self._recorder = Recorder(backend, wait=not self.config.use_pytorch_profiler)

    def _note_gradients(self, span: Span) -> None:
        """At the end of each phase, names the storages of the gradients that exist then."""
        if span.kind != "phase":
            return
        if self._memory is not None:
            optimizer = self.trainer.optimizer
            given = [p.grad for p in optimizer.model.values() if p.grad is not None]
            self._memory.mark("gradients", (local(g) for g in (*given, *optimizer.main_grads.values())))

    def close(self) -> None:
        """Stops to record, without a result; does nothing if nothing is recorded."""
        if self._stack is not None:
            self._stack.close()
            self._stack, self._recorder, self._memory = None, None, None

    def finish(self) -> None:
        """Stops to record and writes the files; also of a run that ends within the window. Each rank writes its own."""
        recorder, memory, stack = self._recorder, self._memory, self._stack
        if stack is None:
            return
        stack.close()
        self._stack = None
        if recorder is not None:
            self._write(recorder, memory)
        if self.trainer.lead:
            self._write_line(f" profiled steps {self._steps[0][0]} to {self._steps[-1][0]}: {self.folder}")

    def _write(self, recorder: Recorder, memory: MemoryHistory | None) -> None:
        c, backend, rank = self.config, hal.backend(), self._rank
        ceilings = measure(backend, self.trainer.device, {torch.float32, c.params_dtype})
        of = rows(recorder.spans, recorder.refusals, ceilings)
        seconds = sum(end - begin for _, begin, end in self._steps) * 1e-9
        samples = len(self._steps) * self.trainer.batch_size / self.trainer.world.size
        model_flops = samples * c.seq_length * flops_per_token(c) / seconds
        peak = ceilings.products.get(str(c.params_dtype).removeprefix("torch.")) if ceilings is not None else None
        record: dict[str, Any] = {
            "rank": rank,
            "world": self.trainer.world.size,
            "backend": backend.name,
            "simulated": backend.simulated,
            "device": str(self.trainer.device),
            "waits_for_device": recorder.waits,
            "asynchronous": backend.capabilities().asynchronous,
            "steps": [[n, begin + self._offset, end + self._offset] for n, begin, end in self._steps],
            "ops": of,
            "ceilings": None if ceilings is None else {"copy": ceilings.copy, "products": ceilings.products},
            "model_flops_per_second": model_flops,
            "mfu": None if peak is None else model_flops / peak,
            "seconds": seconds,
            "op_seconds": sum(row["seconds"] for row in of),
            "blocked_seconds": blocked_seconds(recorder.spans),
            "phases": _phases(recorder.spans),
            "spans": [
                [s.kind, s.name, s.begin + self._offset, s.end + self._offset]
                for s in recorder.spans
                if s.kind == "phase" or (s.kind == "communication" and s.facts["part"] != "start")
            ],
            "collectives": as_json(collectives(recorder.spans, self._offset)),
            "memory": None if memory is None else self._memory_record(memory),
        }
        write_text(self.folder / f"rank-{rank}.json", json.dumps(record, allow_nan=False) + "\n")
        trace = chrome_trace(recorder.spans, rank, self._offset)
        write_text(self.folder / f"rank-{rank}.trace.json", json.dumps(trace, allow_nan=False) + "\n")
        if memory is not None:
            path = Path(c.memory_snapshot_path)
            memory.save_snapshot(self.folder / path.with_name(f"{path.stem}_{rank}{path.suffix}"), recorder.spans)

    def _memory_record(self, memory: MemoryHistory) -> dict[str, Any]:
        """The curve, thinned to some points among which the peak stays, and the bytes of each kind at the peak."""
        times, curves = memory.curve()
        first = self._steps[0][1]
        totals = [sum(curve[i] for curve in curves.values()) for i in range(len(times))]
        step = max(1, -(-len(times) // _POINTS))
        kept = [max(range(i, min(i + step, len(times))), key=totals.__getitem__) for i in range(0, len(times), step)]
        return {
            "times": [max(0.0, (times[i] - first) * 1e-9) for i in kept],
            "bytes": {kind: [curve[i] for i in kept] for kind, curve in curves.items()},
            "peak": dict(memory.peak()),
        }


def _phases(recorded: list[Span]) -> dict[str, float]:
    """Seconds by phase."""
    seconds: dict[str, float] = {}
    for span in recorded:
        if span.kind == "phase":
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
    return seconds
