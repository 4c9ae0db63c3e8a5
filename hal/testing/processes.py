"""Runs a function on N processes of this machine, as ranks of one world, and returns their results.

For tests: the processes are forked from a server that has imported torch already, and the trainer if the caller has
(about 0.1 s each), the store is in the calling process on a port that the system chose, on the loopback interface, and
the first failure ends all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from hal.errors import HalError

_PRELOADED = ("torch", "torch.distributed", "hal.ops")
_TRAINER = ("hal.model.training.trainer", "hal.model.training.pipeline")


def run_processes(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
    expect_exit: Sequence[int] = (),
) -> list[Any]:
    """[function(*args) on rank 0, ..., on rank size-1]; `function` and the results must be picklable.

    expect_exit: ranks that are allowed to end without a result; theirs is None.
    Raises HalError with the traceback of the rank that failed first, or if `timeout` seconds pass.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The agent's flag makes every rank a client of this store, so no port has to be guessed.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    context = multiprocessing.get_context("forkserver")
    # Of consequence for the first call only, which starts the server.
    context.set_forkserver_preload([*_PRELOADED, *(_TRAINER if _TRAINER[0] in sys.modules else ())])
    processes, pipes = [], []
    for rank in range(size):
        receiving, sending = context.Pipe(duplex=False)
        variables = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_child, args=(sending, variables, function, args), daemon=True)
        process.start()
        sending.close()
        processes.append(process)
        pipes.append(receiving)
    try:
        return _collect(pipes, timeout, expect_exit)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(pipes: list[Connection], timeout: float, expect_exit: Sequence[int]) -> list[Any]:
    """The results in rank order. Raises HalError for the first rank that fails, or when `timeout` has passed."""
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout
    while len(results) < len(pipes):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(open_pipes), max(0.0, end - time.monotonic()))
        if not ready:
            raise HalError(f"ranks {sorted(open_pipes.values())} had no result after {timeout:g} s")
        for pipe in ready:
            rank = open_pipes[pipe]  # type: ignore[index]
            try:
                ok, value = pipe.recv()  # type: ignore[union-attr, call-arg]
            except EOFError:
                ok, value = rank in expect_exit, None if rank in expect_exit else "the process ended without a result"
            if not ok:
                raise HalError(f"rank {rank} of {len(pipes)} failed first:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _child(pipe: Connection, variables: Mapping[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    import torch

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Destructors are not run, because those of process groups wait for peers that may have ended.
    os._exit(0)
