"""The program of a worker process, which creates and runs candidates on request. `workers.py` is the parent's side.

Requests and replies are JSON objects, one per line. `against.py` sends the same requests to the workers of other
checkouts, so a change of this protocol makes comparisons with older commits impossible:

    {"do": "make", "suite": MODULE, "case": INDEX, "candidate": NAME}   -> {"value": null}
    {"do": "run", "candidate": NAME, "n": CALLS}                        -> {"value": SECONDS}
    {"do": "peak", "candidate": NAME}                                   -> {"value": BYTES}
    {"do": "count", "candidate": NAME}                                  -> {"value": what the call returned}
    {"do": "drop", "candidate": NAME}                                   -> {"value": null}

A request that raises an exception is answered by {"unavailable": TEXT}.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import time
import traceback
from itertools import repeat
from pathlib import Path
from typing import IO, Any

import hal
from hal.core import registry

from . import machine, target
from .case import Candidate, Thunk
from .engine import CEILING
from .roofline import CEILINGS


def timed(thunk: Thunk, n: int) -> float:
    """Seconds of n consecutive calls, until the device has completed them."""
    clock = time.process_time if machine.ONE_THREAD in os.environ else time.perf_counter
    start = clock()
    for _ in repeat(None, n):
        thunk()
    target.backend().synchronize()
    return clock() - start


def _status(key: str) -> int:
    """Bytes that /proc/self/status reports in the line `key`."""
    line = next(v for v in Path("/proc/self/status").read_text().splitlines() if v.startswith(key))
    return int(line.split()[1]) * 1024


def _peak(thunk: Thunk) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # "5" resets VmHWM, the peak of the resident set
    before = _status("VmRSS")
    thunk()
    return _status("VmHWM") - before


def _make(suite: str, index: int, name: str) -> Thunk:
    case = importlib.import_module(suite).cases()[index]
    if name == CEILING:
        return CEILINGS[case.ceiling].make()
    candidate: Candidate = case.candidates[name]
    return candidate.make()


def _answer(request: dict[str, Any], thunks: dict[str, Thunk]) -> object:
    """Executes one request. thunks: the candidates created so far, by name; "make" and "drop" change it."""
    name = request["candidate"]
    match request["do"]:
        case "make":
            thunks[name] = _make(request["suite"], request["case"], name)
            return None
        case "drop":
            thunks.pop(name, None)
            gc.collect()
            return None
        case "peak":
            return _peak(thunks[name])
        case "count":
            return thunks[name]()
        case "run":
            return timed(thunks[name], request["n"])
        case other:
            raise ValueError(f"unknown request {other!r}")


def serve(stream: IO[str]) -> None:
    """Answers requests until the parent closes its end."""
    thunks: dict[str, Thunk] = {}
    for line in stream:
        reply: dict[str, Any]
        try:
            reply = {"value": _answer(json.loads(line), thunks)}
        except Exception as error:
            traceback.print_exc()
            reply = {"unavailable": f"{type(error).__name__}: {error}"[:600]}
        stream.write(json.dumps(reply) + "\n")
        stream.flush()


def main(fd: int, backend: str, process: str) -> None:
    """Serves requests on file descriptor `fd`; `backend` is activated in HAL's own processes only (see target.py)."""
    target.set_backend(hal.use(backend) if process.startswith("hal") else registry.make(backend))
    channel = socket.socket(fileno=fd)
    with channel, channel.makefile("rw") as stream:
        serve(stream)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
