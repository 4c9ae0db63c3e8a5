"""Runs one node's workers of a job with torchrun's elastic agent, and reports failures.

Guarantees: a failed worker ends the job within seconds, and the report starts with the worker that failed first; on one
node every port is on the loopback interface; when the job has ended, no process of it runs and no port is open.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hal.comm.network import interface_to
from hal.errors import ContractError, HalError

from . import rendezvous
from .megatron import mark_path
from .worker import FOLDER, RESUME, failure_path, log_path, stop_path

_INTERVAL = 0.1
"""Seconds between two polls of the workers and their logs."""
_STOP_SECONDS = 30.0
"""The minimum number of seconds that workers have to save and end after a request to stop."""
_GRACE = 2
"""Seconds between SIGTERM and SIGKILL for the other workers when one has failed. It is short because they have nothing
to save, and because workers that wait in a collective do not end by themselves."""


@dataclass(frozen=True)
class Job:
    """The processes of one node.

    command: a hal command, `-m MODULE` or a script, with arguments. nproc: processes on this node. master_addr,
    master_port: address of the store on node 0 (port 0 on one node: the system chooses). log_dir: folder of the
    worker_RANK.log (None: a temporary folder, kept if the job fails). cluster_timeout: seconds to wait for the other
    nodes. environment: variables that are added to the workers'. exit_signal_grace: seconds that the workers have to
    save and end after SIGTERM (None: at least 30, or what they have requested). max_restarts: how often failed workers
    are started again. min_nodes: number of nodes with which the job continues if others have failed (0: all).
    """

    command: Sequence[str]
    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    log_dir: Path | None = None
    cluster_timeout: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)
    exit_signal_grace: float | None = None
    max_restarts: int = 0
    min_nodes: int = 0

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.nnodes < 1 or not 0 <= self.node_rank < self.nnodes:
            raise ContractError(
                f"launch: {self.nproc} processes on node {self.node_rank} of {self.nnodes}; a node runs at least one "
                "process, and its rank is less than the number of nodes"
            )
        if not 0 <= self.master_port <= 65535:
            raise ContractError(
                f"launch: --master-port is at most 65535, and 0 lets the system choose; found {self.master_port}"
            )
        if not 0 < self.cluster_timeout < math.inf:
            raise ContractError(
                f"launch: --cluster-timeout is a number of seconds above 0; found {self.cluster_timeout}"
            )
        if self.nnodes > 1 and not 1024 <= self.master_port <= 65535:
            raise ContractError(
                f"launch: {self.nnodes} nodes need an agreed --master-port in 1024..65535, not {self.master_port}"
            )
        if self.exit_signal_grace is not None and not 0 < self.exit_signal_grace < math.inf:
            raise ContractError(
                f"launch: --exit-signal-grace is a number of seconds above 0; found {self.exit_signal_grace}"
            )
        if self.max_restarts < 0 or not 0 <= self.min_nodes <= self.nnodes:
            raise ContractError(
                f"launch: --max-restarts is at least 0, and --nnodes MIN:MAX has MIN <= MAX; found "
                f"{self.max_restarts} and {self.min_nodes}:{self.nnodes}"
            )
        if not self.command:
            raise ContractError(
                "launch: nothing to run; give a command, e.g. `hal launch --nproc-per-node 2 train ...`"
            )


def without_working_directory(module: str) -> list[str]:
    """Arguments of Python that run `main` of a module of HAL; the command's own arguments follow.

    The working directory is not on sys.path, where any file could hide a module of the standard library; HAL's own
    folder comes last.
    """
    program = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append(sys.argv.pop(1)); "
        f"from {module} import main; sys.exit(main(sys.argv[1:]))"
    )
    return ["-c", program, str(Path(__file__).parents[2])]


def run(job: Job) -> int:
    """Runs this node's workers until the job ends; the exit code is 0, or that of the worker that failed first."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its report is replaced by _explain's
    temporary = job.log_dir is None
    folder = Path(tempfile.mkdtemp(prefix="hal-job-")) if job.log_dir is None else job.log_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HalError(f"launch: --log-dir {folder} cannot be created ({error.strerror}); give another") from None
    for stale in (*folder.glob("failure_*.json"), mark_path(folder), stop_path(folder)):
        stale.unlink(missing_ok=True)
    with _scratch() as scratch, _environment(job, folder, scratch):
        code = _supervise(job, folder, scratch)
    stop_path(folder).unlink(missing_ok=True)
    if temporary and code == 0:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return code


@contextlib.contextmanager
def _environment(job: Job, folder: Path, scratch: Path) -> Iterator[None]:
    """Sets the workers' environment variables in this process, from which the agent passes them on."""
    before = dict(os.environ)
    os.environ[FOLDER] = str(folder)
    for name in (rendezvous.STORE, rendezvous.ATTEMPT, RESUME):
        os.environ.pop(name, None)
    if job.max_restarts or 0 < job.min_nodes < job.nnodes:
        os.environ[RESUME] = "1"
    if job.nnodes == 1:
        os.environ[rendezvous.STORE] = str(scratch)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.nproc)))
    interface = interface_to(job.master_addr, job.master_port or 9)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.update(job.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _supervise(job: Job, folder: Path, scratch: Path) -> int:
    """Runs the workers until the job ends; the exit code of `run`. scratch: an empty private folder."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

    restarts: list[str] = []

    class Agent(LocalElasticAgent):
        ended_here: frozenset[int] = frozenset()
        """Ranks that still ran when another one failed, so that this agent has ended them."""
        result: Any = None
        """What the workers' last poll returned."""
        grace = _GRACE
        """Seconds after which workers are killed that were told to end."""
        by_agent = False
        """Whether the agent itself stops the workers now, to start them again or because one has failed."""

        def _start_workers(self, *args: Any, **kwargs: Any) -> Any:
            self.ended_here = frozenset()
            os.environ[rendezvous.ATTEMPT] = str(len(restarts))
            started = super()._start_workers(*args, **kwargs)
            context: Any = self._pcontext
            end = context.close

            def close(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
                running = {i for i, handler in context.subprocess_handlers.items() if handler.proc.poll() is None}
                workers = self.get_worker_group().workers
                self.ended_here |= {w.global_rank for w in workers if w.local_rank in running}
                end(death_sig, self.grace)

            context.close = close
            return started

        def _monitor_workers(self, *args: Any, **kwargs: Any) -> Any:
            self.result = super()._monitor_workers(*args, **kwargs)
            if self.result.state == WorkerState.FAILED and _wrong_input(folder, self.ranks()):
                self._remaining_restarts = 0  # it would fail again
            return self.result

        def _restart_workers(self, *args: Any, **kwargs: Any) -> None:
            if self.result.state == WorkerState.HEALTHY:
                restarts.append("the number of machines changed")
            else:
                context: Any = self._pcontext
                context.close(signal.SIGTERM)
                exit_codes = {rank: failure.exitcode for rank, failure in self.result.failures.items()}
                restarts.append(_explain(folder, self.ranks(), exit_codes, self.ended_here)[1])
            for failure in folder.glob("failure_*.json"):
                failure.unlink()
            print(
                f"hal launch: {restarts[-1]}; the workers start again ({self._remaining_restarts} of "
                f"{job.max_restarts} restarts left)",
                file=sys.stderr,
            )
            super()._restart_workers(*args, **kwargs)

        def _stop_workers(self, *args: Any, **kwargs: Any) -> None:
            self.by_agent = True
            super()._stop_workers(*args, **kwargs)  # calls _shutdown
            self.by_agent = False

        def _shutdown(self, *args: Any, **kwargs: Any) -> None:
            # If this process was requested to stop, the workers save a checkpoint. torch's own timeouts are not used,
            # because torch 2.6 has none.
            self.grace = _GRACE if self.by_agent else math.ceil(_stop_seconds(job, folder))
            super()._shutdown(*args, **kwargs)

        def ranks(self) -> list[int]:
            return [worker.global_rank for worker in self.get_worker_group().workers]

    spec = WorkerSpec(
        role="hal",
        local_world_size=job.nproc,
        entrypoint=sys.executable,
        args=("-u", *without_working_directory("hal.launch.worker"), *job.command),
        rdzv_handler=_rendezvous(job),
        max_restarts=job.max_restarts,
        monitor_interval=_INTERVAL,
    )
    agent = Agent(spec, DefaultLogsSpecs(log_dir=str(scratch)), exit_barrier_timeout=job.cluster_timeout)
    with _following(agent, folder):
        try:
            result = agent.run()
        except SignalException as stop:
            # Workers that handled the signal as a request to stop, saved, and ended with 0 have succeeded.
            handlers = getattr(agent._pcontext, "subprocess_handlers", {})
            codes = [handler.proc.returncode for handler in handlers.values()]
            if -signal.SIGKILL in codes:
                print(
                    f"hal launch: the workers had not stopped {_stop_seconds(job, folder):.0f} s after "
                    f"{_signal_name(int(stop.sigval))} and were killed; raise --exit-signal-grace, and the time that "
                    "the scheduler allows, above the time of a step and a save",
                    file=sys.stderr,
                )
            return 0 if codes and not any(codes) else 128 + int(stop.sigval)
    succeeded = result is not None and result.state == WorkerState.SUCCEEDED
    code = 0
    if not succeeded:
        failures = {} if result is None else result.failures
        exit_codes = {rank: failure.exitcode for rank, failure in failures.items()}
        code, reason = _explain(folder, agent.ranks(), exit_codes, agent.ended_here) if exit_codes else (1, "it ended")
        if restarts:
            restarts.append(reason)
    if restarts:
        ending = "the job then succeeded" if succeeded else "the job has failed"
        print(f"hal launch: {ending}; what happened: {'; '.join(restarts)}", file=sys.stderr)
    return code


def _rendezvous(job: Job) -> Any:
    if job.nnodes == 1:
        return rendezvous.local(job.master_addr)
    place = job.master_addr, job.master_port, job.node_rank
    if job.max_restarts or job.min_nodes not in (0, job.nnodes):
        return rendezvous.elastic(*place, job.min_nodes or job.nnodes, job.nnodes, job.cluster_timeout)
    return rendezvous.fixed(*place, job.nnodes, job.cluster_timeout)


def _stop_seconds(job: Job, folder: Path) -> float:
    """Seconds from a request to stop until the workers are killed."""
    if job.exit_signal_grace is not None:
        return job.exit_signal_grace
    try:
        return max(_STOP_SECONDS, float(stop_path(folder).read_text()))
    except (OSError, ValueError):
        return _STOP_SECONDS


def _wrong_input(folder: Path, ranks: Sequence[int]) -> bool:
    """Whether a worker ended because of its options or its input, so that it would fail again."""
    paths = (failure_path(folder, rank) for rank in ranks)
    return any(json.loads(path.read_text())["code"] == 2 for path in paths if path.exists())


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A private temporary folder, locked while it is in use; removes those that killed launchers have left."""
    for stale in Path(tempfile.gettempdir()).glob("hal-agent-*"):
        with contextlib.suppress(OSError):
            if stale.stat().st_uid == os.geteuid() and not stale.is_symlink():
                handle = os.open(stale, os.O_RDONLY)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # A newer one may belong to a launcher that has not locked it yet. A folder whose time is in the
                    # future is not newer: the clock has been set back.
                    if abs(time.time() - stale.stat().st_mtime) > 1:
                        shutil.rmtree(stale, ignore_errors=True)
                finally:
                    os.close(handle)
    with tempfile.TemporaryDirectory(prefix="hal-agent-") as name:
        handle = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(handle)


def _shown(folder: Path) -> tuple[int, ...]:
    """Indices of the workers whose output is copied to the console: the first, and the last for Megatron-LM's scripts.

    Those print their losses on the last rank.
    """
    return (0, -1) if mark_path(folder).exists() else (0,)


@contextlib.contextmanager
def _following(agent: Any, folder: Path) -> Iterator[None]:
    """Copies the logs of the workers given by `_shown` to the console while they run."""
    stop = threading.Event()
    # Logs of an earlier job in the same folder are not copied before a worker has written to them.
    earlier = {path: _modified(path) for path in folder.glob("worker_*.log")}

    def copy() -> None:
        positions: dict[Path, int] = {}
        while True:
            last = stop.is_set()
            workers = agent.get_worker_group().workers
            if workers and all(w.global_rank is not None and w.id is not None for w in workers):
                for i in _shown(folder):
                    positions.setdefault(log_path(folder, workers[i].global_rank), 0)
            for path in [path for path in positions if path.exists() and _modified(path) != earlier.get(path)]:
                with path.open("rb") as log:
                    log.seek(positions[path])
                    text = log.read()
                positions[path] += len(text)
                sys.stdout.write(text.decode(errors="replace"))
                sys.stdout.flush()
            if last:
                return
            stop.wait(_INTERVAL)

    thread = threading.Thread(target=copy, name="hal-follow-log")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _modified(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def _explain(
    folder: Path, ranks: Sequence[int], exit_codes: Mapping[int, int], ended_here: Collection[int]
) -> tuple[int, str]:
    """Prints why the workers failed, the first cause first; returns the exit code and the first cause."""
    records = {r: json.loads(failure_path(folder, r).read_text()) for r in ranks if failure_path(folder, r).exists()}
    # A process that was ended by a signal (out of memory, a crash) has left no record. It comes first, because no
    # failure of another rank can have caused it.
    unrecorded = [r for r in exit_codes if r not in records]
    killed = [r for r in unrecorded if exit_codes[r] < 0 and r not in ended_here]
    recorded = sorted(records, key=lambda r: records[r]["time"])
    order = list(dict.fromkeys([*killed, *recorded, *unrecorded]))
    first = order[0]
    code = records[first]["code"] if first in records else exit_codes[first]
    how = f"exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"
    print(f"hal launch: rank {first} failed first ({how}); its log is {log_path(folder, first)}", file=sys.stderr)
    text = records[first]["text"].rstrip() if first in records else ""
    print(text or _tail(log_path(folder, first)), file=sys.stderr)
    for rank in order[1:]:
        if rank in records:
            last = [line for line in records[rank]["text"].splitlines() if line.strip()][-1:]
            print(
                f"hal launch: then rank {rank}: {''.join(last) or 'exit code ' + str(records[rank]['code'])}",
                file=sys.stderr,
            )
    stopped = [r for r in order[1:] if r not in records]
    if stopped:
        print(f"hal launch: then ended: ranks {', '.join(map(str, sorted(stopped)))}", file=sys.stderr)
    return code if code > 0 else 1, f"rank {first} failed first ({how})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(it wrote no log)"
