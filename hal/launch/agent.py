"""Runs one node's workers of a job with torchrun's elastic agent, and reports failures.

Guarantees: a failed worker ends the job within seconds, and the report starts with the worker that failed first; on one
node every port is on the loopback interface; when the job has ended, no process of it runs and no port is open.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hal.comm.network import interface_to
from hal.errors import ContractError, HalError

from .megatron import mark_path
from .worker import FOLDER, failure_path, log_path

_INTERVAL = 0.1
"""Seconds between two polls of the workers and their logs."""
_GRACE = 2
"""Seconds between SIGTERM and SIGKILL for the other workers when one has failed. It is short because they have nothing
to save, and because workers that wait in a collective do not end by themselves."""


@dataclass(frozen=True)
class Job:
    """The processes of one node.

    command: a hal command, `-m MODULE` or a script, with arguments. nproc: processes on this node. master_addr,
    master_port: address of the store on node 0 (port 0 on one node: the system chooses). log_dir: folder of the
    worker_RANK.log (None: a temporary folder, kept if the job fails). cluster_timeout: seconds to wait for the other
    nodes. environment: variables that are added to the workers'.
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
        if not self.command:
            raise ContractError(
                "launch: nothing to run; give a command, e.g. `hal launch --nproc-per-node 2 train ...`"
            )


def run(job: Job) -> int:
    """Runs this node's workers until the job ends; the exit code is 0, or that of the worker that failed first."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its report is replaced by _explain's
    temporary = job.log_dir is None
    folder = Path(tempfile.mkdtemp(prefix="hal-job-")) if job.log_dir is None else job.log_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HalError(f"launch: --log-dir {folder} cannot be created ({error.strerror}); give another") from None
    for stale in (*folder.glob("failure_*.json"), mark_path(folder)):
        stale.unlink(missing_ok=True)
    store = _store(job)
    try:
        with _environment(job, folder):
            code = _supervise(job, store, folder)
    finally:
        del store
    if temporary and code == 0:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return code


def _store(job: Job) -> Any:
    """The job's store. Its socket is bound here, because torch would listen on every interface."""
    from datetime import timedelta

    from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=job.cluster_timeout)
    if job.node_rank:
        try:
            return TCPStore(job.master_addr, job.master_port, is_master=False, timeout=timeout)
        except (DistNetworkError, DistStoreError) as error:
            raise HalError(
                f"launch: node 0 at {job.master_addr}:{job.master_port} did not answer within "
                f"{job.cluster_timeout:g} s; is it started, and is the port open? ({_first_line(error)})"
            ) from error
    try:
        family, _, _, _, address = socket.getaddrinfo(job.master_addr, job.master_port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise HalError(
            f"launch: node 0 cannot listen on {job.master_addr}:{job.master_port}: {error.strerror or error}; choose "
            "another --master-port, or a --master-addr of this machine"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(
        job.master_addr,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


@contextlib.contextmanager
def _environment(job: Job, folder: Path) -> Iterator[None]:
    """Sets the workers' environment variables in this process, from which the agent passes them on."""
    before = dict(os.environ)
    os.environ[FOLDER] = str(folder)
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


def _supervise(job: Job, store: Any, folder: Path) -> int:
    """Runs the workers until the job ends; the exit code of `run`."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

    class Agent(LocalElasticAgent):
        ended_here: frozenset[int] = frozenset()
        """Ranks that still ran when another one failed, so that this agent has ended them."""

        def _start_workers(self, *args: Any, **kwargs: Any) -> Any:
            started = super()._start_workers(*args, **kwargs)
            context: Any = self._pcontext
            end = context.close

            def close(death_sig: signal.Signals | None = None, timeout: int = _GRACE) -> None:
                running = {i for i, handler in context.subprocess_handlers.items() if handler.proc.poll() is None}
                workers = self.get_worker_group().workers
                self.ended_here |= {w.global_rank for w in workers if w.local_rank in running}
                end(death_sig, timeout)

            context.close = close
            return started

        def _stop_workers(self, *args: Any, **kwargs: Any) -> None:
            self._shutdown(signal.SIGTERM, timeout=_GRACE)

    spec = WorkerSpec(
        role="hal",
        local_world_size=job.nproc,
        entrypoint=sys.executable,
        args=("-u", "-m", "hal.launch.worker", *job.command),
        rdzv_handler=_rendezvous(job, store),
        max_restarts=0,
        monitor_interval=_INTERVAL,
    )
    with tempfile.TemporaryDirectory(prefix="hal-agent-") as scratch:
        agent = Agent(spec, DefaultLogsSpecs(log_dir=scratch), exit_barrier_timeout=job.cluster_timeout)
        with _following(agent, folder):
            try:
                result = agent.run()
            except SignalException as stop:
                # Workers that handled the signal as a request to stop, saved, and ended with 0 have succeeded.
                handlers = getattr(agent._pcontext, "subprocess_handlers", {})
                codes = [handler.proc.returncode for handler in handlers.values()]
                return 0 if codes and not any(codes) else 128 + int(stop.sigval)
    ranks = [worker.global_rank for worker in agent.get_worker_group().workers]
    if result.state == WorkerState.SUCCEEDED:
        return 0
    exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    return _explain(folder, ranks, exit_codes, agent.ended_here)


def _rendezvous(job: Job, store: Any) -> Any:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class Fixed(RendezvousHandler):
        """The nodes are known in advance, so that no rendezvous is needed, only the store."""

        def get_backend(self) -> str:
            return "hal"

        @property
        def use_agent_store(self) -> bool:
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            info = RendezvousStoreInfo(job.master_addr, store.port)
            return RendezvousInfo(store, job.node_rank, job.nnodes, info)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            return None

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return "hal"

        def shutdown(self) -> bool:
            return True

    return Fixed()


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


def _explain(folder: Path, ranks: Sequence[int], exit_codes: Mapping[int, int], ended_here: Collection[int]) -> int:
    """Prints why the job failed, the first cause first; returns its exit code."""
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
    return code if code > 0 else 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(it wrote no log)"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
