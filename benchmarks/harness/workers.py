"""The parent's side of the worker processes in which candidates run (`worker.py` is the workers' side).

There is one process per (process name, allocator, rank), because glibc reads the allocator's environment when a process
starts, and so that a peer that changes a process-wide setting cannot affect others. Parent and worker communicate over
a socket pair.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from hal.errors import HalError

from . import machine
from .case import Case
from .engine import CEILING

PATIENCE = 900.0
"""Seconds after which a worker that does not answer counts as hung (torch.compile takes minutes on a cold cache)."""


class Unavailable(Exception):
    """A candidate that cannot run here, with the reason."""


@dataclass(frozen=True)
class Program:
    """The program of a worker process: the module with `worker.main`, run in `cwd` (None: this folder) with `env`."""

    module: str = "hal.bench.harness.worker"
    cwd: Path | None = None
    env: Mapping[str, str] | None = None


class Worker:
    """One child process. `ask` sends a request; `answer` waits for the reply."""

    def __init__(self, program: Program, name: str, backend: str, process: str, env: Mapping[str, str]) -> None:
        self.name = name
        parent_end, child_end = socket.socketpair()
        parent_end.settimeout(PATIENCE)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-m", program.module, str(child_end.fileno()), backend, process],
            cwd=program.cwd,
            env={**env, **(program.env or {})},
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C must reach only the parent, which ends the workers
        )
        child_end.close()
        self._socket, self._stream = parent_end, parent_end.makefile("rw")

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, **request: Any) -> None:
        with contextlib.suppress(OSError):  # `answer` reports a worker that has died
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()

    def answer(self) -> Any:
        """The reply. Raises Unavailable (the candidate cannot run), HalError (the worker died or hangs)."""
        try:
            line = self._stream.readline()
        except OSError as error:
            raise HalError(f"benchmark process {self.name} did not answer: {error}\n{self._log_tail()}") from error
        if not line:
            raise HalError(
                f"benchmark process {self.name} died (status {self._child.wait()}); its log ends:\n{self._log_tail()}"
            )
        reply = json.loads(line)
        if "unavailable" in reply:
            raise Unavailable(reply["unavailable"])
        return reply["value"]

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the buffer may hold a request that a dead worker never read
            self._stream.close()
        self._socket.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()


class Workers:
    """All worker processes of one suite, started when first needed; they are the engine's `Meter`.

    suite: the module of the suite, as the workers import it. one_thread: see machine.ONE_THREAD.
    """

    def __init__(self, suite: str, backend: str, one_thread: bool = False, program: Program | None = None) -> None:
        self._suite, self._backend, self._one_thread = suite, backend, one_thread
        self._program = program or Program()
        self._groups: dict[tuple[str, str], list[Worker]] = {}  # by (process, allocator); one worker per rank
        self._group_of: dict[str, list[Worker]] = {}  # by candidate
        self._folder = tempfile.TemporaryDirectory(prefix="hal-bench-")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for group in self._groups.values():
            for worker in group:
                worker.close()
        self._folder.cleanup()

    def prepare(self, index: int, case: Case, name: str, allocator: str) -> None:
        """Creates candidate `name` of the suite's case number `index`. Raises Unavailable if it cannot run."""
        if name == CEILING:
            process, allocator, ranks = "ceiling", "pooled", 1
        else:
            candidate = case.candidates[name]
            process, ranks = candidate.process, candidate.ranks
        key = (process, allocator)
        if key not in self._groups:
            self._groups[key] = [self._start(process, allocator, rank, ranks) for rank in range(ranks)]
        self._group_of[name] = self._groups[key]
        self._ask_all(name, do="make", suite=self._suite, case=index, candidate=name)

    def _start(self, process: str, allocator: str, rank: int, ranks: int) -> Worker:
        name = f"{process}/{allocator}"
        env = machine.environment(allocator, one_thread=self._one_thread)
        if ranks > 1:
            name += f"/rank {rank}"
            rendezvous = str(Path(self._folder.name) / f"{process}-{allocator}")
            env |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "OMP_NUM_THREADS": "1",
                machine.RENDEZVOUS: rendezvous,
            }
        return Worker(self._program, name, self._backend, process, env)

    def release(self) -> None:
        """Drops all candidates, so that their memory is freed."""
        for name in list(self._group_of):
            self._ask_all(name, do="drop", candidate=name)
        self._group_of.clear()

    def kill(self) -> None:
        """Ends all workers immediately, even during a call."""
        for group in self._groups.values():
            for worker in group:
                worker.kill()
        self._group_of.clear()

    def run(self, name: str, n: int) -> float:
        """Seconds that n calls took (on the slowest rank)."""
        return float(max(self._ask_all(name, do="run", candidate=name, n=n)))

    def peak(self, name: str) -> float:
        """Bytes that one call adds to the process's resident memory at its peak."""
        return float(max(self._ask_all(name, do="peak", candidate=name)))

    def count(self, name: str) -> float:
        """The number that one call returns (the largest of the ranks')."""
        return float(max(self._ask_all(name, do="count", candidate=name)))

    def _ask_all(self, name: str, **request: Any) -> list[Any]:
        """The replies of all ranks. All requests are sent before waiting, because ranks may run collectives."""
        group = self._group_of[name]
        for worker in group:
            worker.ask(**request)
        replies, unavailable = [], None
        for worker in group:  # every reply is read, so that none is mistaken for that of a later request
            try:
                replies.append(worker.answer())
            except Unavailable as error:
                unavailable = error
        if unavailable is not None:
            raise unavailable
        return replies

    def pids(self) -> list[int]:
        return [worker.pid for group in self._groups.values() for worker in group]

    def start_round(self) -> None:
        """Restarts the count of `other_load`."""
        self._other_load = machine.OtherLoad([os.getpid(), *self.pids()])

    def other_load(self) -> float:
        """Share of one processor that processes other than these used since `start_round`."""
        return self._other_load.share()
