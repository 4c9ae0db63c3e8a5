"""The processes in which candidates run, and the parent's end of them.

One process per (kind, allocator, rank): the allocator's environment is read when a process starts, and a peer that sets
something process-wide cannot disturb another. Parent and worker exchange one JSON object per line over a socket pair.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from hal.errors import HalError

from . import machine
from .case import Call, Case
from .engine import CEILING

PATIENCE = 900.0
"""Seconds after which a worker that does not answer counts as hung (torch.compile takes minutes on a cold cache)."""


class Unavailable(Exception):
    """A candidate that cannot run here; the text says why."""


class Worker:
    """One child process. `ask` sends a request; `answer` waits for the reply."""

    def __init__(
        self, backend: str, process: str, allocator: str, rank: int, ranks: int, meeting: str, one_thread: bool
    ) -> None:
        self.name = f"{process}/{allocator}" + (f"/rank {rank}" if ranks > 1 else "")
        mine, theirs = socket.socketpair()
        mine.settimeout(PATIENCE)
        env = machine.environment(allocator, one_thread=one_thread)
        if ranks > 1:
            env |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "HAL_BENCH_MEETING": meeting}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-m", "hal.bench.worker", str(theirs.fileno()), backend, process],
            env=env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # an interrupt is the parent's to handle
        )
        theirs.close()
        self._socket, self._stream = mine, mine.makefile("rw")

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, **request: Any) -> None:
        with contextlib.suppress(OSError):  # a dead worker is reported by `answer`
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()

    def answer(self) -> Any:
        """The reply. Raises Unavailable (the candidate cannot run), HalError (the worker died or hangs)."""
        try:
            line = self._stream.readline()
        except OSError as error:
            raise HalError(f"benchmark process {self.name} did not answer: {error}\n{self._tail()}") from error
        if not line:
            raise HalError(
                f"benchmark process {self.name} died (status {self._child.wait()}); its last words:\n{self._tail()}"
            )
        reply = json.loads(line)
        if "unavailable" in reply:
            raise Unavailable(reply["unavailable"])
        return reply["value"]

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it holds what a dead worker did not take
            self._stream.close()
        self._socket.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()


class Workers:
    """All child processes of one suite, started when first needed; also the engine's `Clock`.

    suite: the name of its module. one_thread: see machine.ONE_THREAD.
    """

    def __init__(self, suite: str, backend: str, one_thread: bool = False) -> None:
        self._suite, self._backend, self._one_thread = suite, backend, one_thread
        self._alive: dict[tuple[str, str], list[Worker]] = {}
        self._where: dict[str, list[Worker]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hal-bench-")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for group in self._alive.values():
            for worker in group:
                worker.close()
        self._folder.cleanup()

    def prepare(self, index: int, case: Case, name: str, allocator: str) -> None:
        """Makes candidate `name` of the suite's case number `index`. Raises Unavailable if it cannot run."""
        if name == CEILING:
            process, allocator, ranks = "ceiling", "pooled", 1
        else:
            candidate = case.candidates[name]
            process, ranks = candidate.process, candidate.ranks
        key = (process, allocator)
        if key not in self._alive:
            meeting = str(Path(self._folder.name) / f"{process}-{allocator}")
            self._alive[key] = [
                Worker(self._backend, process, allocator, rank, ranks, meeting, self._one_thread)
                for rank in range(ranks)
            ]
        self._where[name] = self._alive[key]
        self._together(name, do="make", suite=self._suite, case=index, candidate=name)

    def release(self) -> None:
        """Forgets all candidates, and gives their memory back."""
        for name in list(self._where):
            self._together(name, do="drop", candidate=name)
        self._where.clear()

    def kill(self) -> None:
        """Ends all workers at once, whatever they are doing."""
        for group in self._alive.values():
            for worker in group:
                worker.kill()
        self._where.clear()

    def run(self, name: str, n: int) -> float:
        """Seconds that n calls took (of the slowest rank)."""
        return float(max(self._together(name, do="run", candidate=name, n=n)))

    def peak(self, name: str) -> float:
        """Bytes that one call adds to the process's resident memory at its peak."""
        return float(max(self._together(name, do="peak", candidate=name)))

    def count(self, name: str) -> float:
        """The figure that one call returns (the largest of the ranks')."""
        return float(max(self._together(name, do="count", candidate=name)))

    def _together(self, name: str, **request: Any) -> list[Any]:
        group = self._where[name]
        for worker in group:
            worker.ask(**request)
        replies, failed = [], None
        for worker in group:
            try:
                replies.append(worker.answer())
            except Unavailable as error:
                failed = error
        if failed is not None:
            raise failed
        return replies

    def restart(self) -> None:
        self._load = machine.Load([os.getpid(), *(w.pid for group in self._alive.values() for w in group)])

    def share(self) -> float:
        return self._load.share()


# What follows runs in the child.

_backend: Any = None


def backend() -> Any:
    """The benchmarked hal.Backend; only HAL's own processes have taken it into use."""
    return _backend


def device() -> Any:
    """The torch.device that candidates put their tensors on: the benchmarked backend's."""
    return _backend.device()


def timed(call: Call, n: int) -> float:
    """Seconds of n calls in a row, until the device has finished them."""
    clock = time.process_time if machine.ONE_THREAD in os.environ else time.perf_counter
    start = clock()
    for _ in repeat(None, n):
        call()
    _backend.synchronize()
    return clock() - start


def _status(key: str) -> int:
    line = next(v for v in Path("/proc/self/status").read_text().splitlines() if v.startswith(key))
    return int(line.split()[1]) * 1024


def _peak(call: Call) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # restarts VmHWM
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _make(suite: str, index: int, name: str) -> Call:
    if name == CEILING:
        from .ceilings import CEILINGS

        return CEILINGS[_cases(suite)[index].ceiling].make()
    return _cases(suite)[index].candidates[name].make()


def _cases(suite: str) -> list[Case]:
    return importlib.import_module(suite).cases()  # type: ignore[no-any-return]


def _serve(stream: IO[str]) -> None:
    made: dict[str, Call] = {}
    for line in stream:
        request = json.loads(line)
        name = request["candidate"]
        reply: dict[str, Any]
        try:
            if request["do"] == "make":
                made[name] = _make(request["suite"], request["case"], name)
                reply = {"value": None}
            elif request["do"] == "drop":
                made.pop(name, None)
                gc.collect()
                reply = {"value": None}
            elif request["do"] == "peak":
                reply = {"value": _peak(made[name])}
            elif request["do"] == "count":
                reply = {"value": made[name]()}
            else:
                reply = {"value": timed(made[name], request["n"])}
        except Exception as error:
            traceback.print_exc()
            reply = {"unavailable": f"{type(error).__name__}: {error}"[:600]}
        stream.write(json.dumps(reply) + "\n")
        stream.flush()


def main(fd: int, backend: str, process: str) -> None:
    """Serves requests on file descriptor `fd` until the parent closes it."""
    global _backend
    import hal
    from hal import registry

    # Only HAL's own process activates the backend: what `use` sets up for HAL must not help (or hurt) a peer.
    _backend = hal.use(backend) if process.startswith("hal") else registry.make(backend)
    channel = socket.socket(fileno=fd)
    with channel, channel.makefile("rw") as stream:
        _serve(stream)


if __name__ == "__main__":
    # As a module of the package, not as __main__: candidates ask this module for the device.
    from hal.bench import worker

    worker.main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
