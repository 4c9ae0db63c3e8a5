"""The main module of a launched process: redirects its output to a log, runs the command, and records a failure.

`python -m hal.launch.worker train ...` runs a hal command, `-m MODULE ...` a module, `FILE.py ...` a script.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from hal.errors import CollectiveTimeout, HalError

from .megatron import mark_path, routed_when_imported
from .rendezvous import attempt, use_file_store

FOLDER = "HAL_WORKER_FOLDER"
"""Environment variable: folder of the logs (worker_RANK.log) and failures (failure_RANK.json) of the job's workers."""


RESUME = "HAL_RESUME"
"""Environment variable: set in jobs whose workers may be started again, so that a run continues from its --save."""


def log_path(folder: Path, rank: int) -> Path:
    """The log of global rank `rank`: its stdout and stderr."""
    return folder / f"worker_{rank}.log"


def failure_path(folder: Path, rank: int) -> Path:
    """The file in which rank `rank` records {rank, time, code, text} if it fails."""
    return folder / f"failure_{rank}.json"


def stop_path(folder: Path) -> Path:
    """The file with the number of seconds that the job's workers need to stop, see `expect_stop`."""
    return folder / "stop_seconds"


def expect_stop(seconds: float) -> None:
    """Reports to the launcher, if there is one, how long a request to stop may take (a step and a save)."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        temporary = stop_path(Path(folder)).with_suffix(".tmp")
        temporary.write_text(f"{seconds:.1f}")
        temporary.rename(stop_path(Path(folder)))


def _redirect(path: Path) -> None:
    # One file description for both streams, in append mode, so that lines appear in the order of writing. A worker that
    # was started again continues the log.
    first = 0 if attempt() else os.O_TRUNC
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | first | os.O_APPEND, 0o640)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _die_with_parent() -> None:
    """On Linux, has the kernel kill this process when the launcher ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _run(argv: Sequence[str], folder: Path) -> int:
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        sys.path.insert(0, "")  # as `python -m`
        with routed_when_imported(mark_path(folder)):
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return 0
    if argv[0].endswith(".py"):
        sys.argv = list(argv)
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        with routed_when_imported(mark_path(folder)):
            runpy.run_path(argv[0], run_name="__main__")
        return 0
    return int(importlib.import_module(f"hal.cli.{argv[0]}").main(list(argv[1:])))


def main(argv: Sequence[str]) -> int:
    """Runs one command as this rank; the exit code is hal's (0 done, 1 failed, 2 wrong usage or input)."""
    rank, folder = int(os.environ["RANK"]), Path(os.environ[FOLDER])
    _die_with_parent()
    _redirect(log_path(folder, rank))
    use_file_store()
    text = ""
    try:
        code = _run(argv, folder)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        text = "" if isinstance(stop.code, int) or stop.code is None else str(stop.code)
    except BaseException as error:
        wrong_input = isinstance(error, (HalError, OSError)) and not isinstance(error, CollectiveTimeout)
        code, text = 2 if wrong_input else 1, traceback.format_exc()
    if code:
        failure = {"rank": rank, "time": time.time(), "code": code, "text": text}
        temporary = failure_path(folder, rank).with_suffix(".tmp")
        temporary.write_text(json.dumps(failure))
        temporary.rename(failure_path(folder, rank))
        print(text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # A normal exit of the interpreter would wait in the destructors of process groups whose peers hang.
        os._exit(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
