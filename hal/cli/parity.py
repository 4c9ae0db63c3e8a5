"""`hal parity`: the conformance kit, on one or several backends. Exit code 0 if nothing failed, else 1.

A refused call is shown with its reasons, an op without implementation is listed (and fails the run only with
--require-all). Several backends run in one process each; --merge adds results of other environments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.errors import HalError
from hal.launch.agent import without_working_directory

from .arguments import Parser, add_backend, options, require_writable, takes_simulate

if TYPE_CHECKING:
    import torch

    from hal.testing.parity_rows import Row


def parser() -> Parser:
    """The options of `hal parity`."""
    command_parser = Parser(
        "parity", description="Runs the conformance kit: every op of a backend against the references."
    )
    add_backend(command_parser, required=False)
    command_parser.add_argument("--op", action="append", metavar="OP", help="only this op; may be given several times")
    command_parser.add_argument(
        "--dtype", action="append", metavar="DTYPE", help="only this dtype, e.g. bfloat16; may be given several times"
    )
    command_parser.add_argument("--json", metavar="FILE", help="also write the rows as a JSON list")
    command_parser.add_argument(
        "--max-examples", type=int, default=None, metavar="N", help="random calls per implementation and dtype"
    )
    command_parser.add_argument(
        "--quick", action="store_true", help="as many calls as fit into about a minute for all ops, no golden losses"
    )
    command_parser.add_argument("--seed", type=int, default=0, help="seed of the random calls")
    command_parser.add_argument(
        "--scale",
        choices=("default", "production"),
        default="default",
        help="production: calls at the sizes of models (reduced on simulators) instead of small ones",
    )
    command_parser.add_argument(
        "--collectives", action="store_true", help="the backend's communication instead of its ops"
    )
    command_parser.add_argument("--nproc", type=int, metavar="N", help="processes for --collectives (default 4)")
    command_parser.add_argument(
        "--require-all", action="store_true", help="fail if an op has no implementation or a call was not run"
    )
    command_parser.add_argument(
        "--todo", action="store_true", help="list missing ops in the order in which a training step needs them"
    )
    command_parser.add_argument(
        "--replay", metavar="FILE", help="repeat a call that `hal train --verify-ops` has found to be wrong and saved"
    )
    group = command_parser.add_argument_group("several backends side by side")
    group.add_argument(
        "--backends",
        metavar="A,B,...",
        help="run these, each in a separate process (--simulate: those that have a simulator)",
    )
    group.add_argument(
        "--merge", nargs="+", default=[], metavar="FILE", help="add results that --json has written elsewhere"
    )
    group.add_argument("--html", metavar="FILE", help="write the table as a self-contained page")
    group.add_argument("--markdown", metavar="FILE", help="write the table as Markdown")
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Runs `hal parity` with these arguments."""
    command_parser = parser()
    arguments = command_parser.parse_args(argv)
    makes_table = arguments.backends is not None or bool(arguments.merge)
    if not makes_table and arguments.backend is None:
        command_parser.error("the following arguments are required: --backend")
    if arguments.max_examples is not None and arguments.max_examples < 0:
        command_parser.error(f"--max-examples must be 0 or more, got {arguments.max_examples}")
    if arguments.nproc is not None and (arguments.nproc < 1 or not arguments.collectives):
        command_parser.error("--nproc is a positive number of processes, and needs --collectives")
    if makes_table and (arguments.collectives or arguments.todo or arguments.json):
        command_parser.error(
            "--backends and --merge make a table; --json, --collectives and --todo are about one --backend"
        )
    if (arguments.collectives or arguments.todo) and (arguments.html or arguments.markdown):
        command_parser.error("--html and --markdown show the ops' results, not --collectives or --todo")
    if arguments.scale == "production" and (makes_table or arguments.collectives or arguments.todo):
        command_parser.error("--scale production is about the ops of one --backend")
    if arguments.scale == "production" and (
        arguments.max_examples is not None or "golden_loss" in (arguments.op or ())
    ):
        command_parser.error("--scale production has no random calls and no golden losses")
    if arguments.quick and (arguments.scale == "production" or makes_table or arguments.collectives or arguments.todo):
        command_parser.error("--quick is about the ops of one --backend at the default scale")
    if arguments.dtype and (makes_table or arguments.collectives or arguments.todo):
        command_parser.error("--dtype is about the ops of one --backend")
    if arguments.todo and arguments.op:
        command_parser.error("--todo lists all ops that are missing; leave out --op")
    others = ("op", "dtype", "json", "quick", "collectives", "todo", "html", "markdown")
    if arguments.replay is not None and (makes_table or any(getattr(arguments, name) for name in others)):
        command_parser.error("--replay repeats one saved call on --backend; it takes no other option")
    for option in ("json", "html", "markdown"):
        require_writable(f"--{option}", getattr(arguments, option))
    if arguments.replay is not None:
        return _replay(arguments)
    if arguments.todo:
        return _todo(arguments)
    if arguments.collectives:
        return _collectives(arguments)
    if makes_table:
        return _side_by_side(arguments)
    return _one(arguments)


@contextlib.contextmanager
def _large_pages() -> Iterator[None]:
    """Lets torch allocate large pages.

    It reads the variable at its first large allocation. With small pages the production tier takes a third longer,
    which the system spends on giving it gigabytes of new memory for every call.
    """
    before = os.environ.get(_LARGE_PAGES)
    os.environ[_LARGE_PAGES] = before or "1"
    try:
        yield
    finally:
        del os.environ[_LARGE_PAGES]
        if before is not None:
            os.environ[_LARGE_PAGES] = before


_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def _one(arguments: argparse.Namespace) -> int:
    try:
        from hal.testing import EXAMPLES, run_by_name
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise HalError("the conformance kit needs hypothesis: pip install hypothesis (or torch-hal[test])") from None

    dtypes = None if not arguments.dtype else _dtypes(arguments.dtype)
    began, progress = time.monotonic(), _Progress()
    with _large_pages() if arguments.scale == "production" else contextlib.nullcontext():
        report = run_by_name(
            arguments.backend,
            options(arguments),
            ops=arguments.op,
            examples=EXAMPLES if arguments.max_examples is None else arguments.max_examples,
            seed=arguments.seed,
            scale=arguments.scale,
            dtypes=dtypes,
            quick=arguments.quick,
            on_row=progress.row,
            on_call=progress.call,
        )
    print(f"{report.summary()}\n{time.monotonic() - began:.0f} s")
    if arguments.json:
        report.write_json(arguments.json)
    _write_pages([report.rows], arguments)
    return 0 if report.ok and not (arguments.require_all and (report.missing or report.not_run)) else 1


def _replay(arguments: argparse.Namespace) -> int:
    from hal.core.dispatch import use
    from hal.testing.verification import replay

    given: dict[str, Any] = dict(options(arguments))
    use(arguments.backend, **given)
    wrong = replay(Path(arguments.replay))
    print(wrong or f"{arguments.replay}: every part that was compared is within its tolerance")
    return 1 if wrong else 0


class _Progress:
    """Prints rows and, on a terminal, the number of calls of the row at work in a line that the row replaces.

    Elsewhere each row is named on stderr before its first call, so that the output of a process that a kernel has ended
    (exit code 139) ends with it.
    """

    def __init__(self) -> None:
        self._shown, self._running = sys.stderr.isatty(), ""

    def call(self, row: str, calls: int) -> None:
        if self._shown:
            print(f"\r\x1b[K{row}: {calls} calls", end="", file=sys.stderr, flush=True)
        elif row != self._running:
            print(f"running {row}", file=sys.stderr, flush=True)
            self._running = row

    def row(self, row: Row) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print(row, flush=True)


def _dtypes(names: Sequence[str]) -> list[torch.dtype]:
    """The dtypes of these names. Raises HalError for a name that no op has a tolerance for."""
    import hal.ops  # noqa: F401  (defines the ops)
    from hal.core.op import OPS

    known = {str(dtype).removeprefix("torch."): dtype for op in OPS.values() for dtype in op.tol}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise HalError(f"--dtype {', '.join(unknown)}: the kit runs {', '.join(sorted(known))}")
    return [known[name] for name in names]


def _side_by_side(arguments: argparse.Namespace) -> int:
    from hal.testing.support import absent_row, read

    results = [read(path) for path in arguments.merge]
    merged = {row.backend for rows in results for row in rows}
    wanted = [name for name in (arguments.backends or "").split(",") if name and name not in merged]
    commands = {
        name: _command(name, arguments) for name in wanted
    }  # raises for an unknown name, before any backend has run
    ran = 0
    for name, command in commands.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            print(f"{name}: {' '.join(command[2:])}", flush=True)
            done = subprocess.run([*command, "--json", str(path)], stderr=subprocess.PIPE, text=True, check=False)
            sys.stderr.write(done.stderr)
            if path.exists():
                results.append(read(path))
                ran += 1
            else:
                lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                if lines[-1].startswith("running "):
                    lines.append(f"exit code {done.returncode} while {lines[-1]}")
                results.append([absent_row(name, lines[-1].removeprefix("hal parity: "))])
    _write_pages(results, arguments)
    failed = [row for rows in results for row in rows if row.status == "fail"]
    for row in failed:
        print(row)
    absent = len(commands) - ran
    print(f"{len(results) - absent} backends, {len(failed)} failures" + (f"; {absent} not run here" if absent else ""))
    return 1 if failed or len(results) == absent else 0


def _command(name: str, arguments: argparse.Namespace) -> list[str]:
    """The command that runs the kit on one backend, in this environment."""
    command = [sys.executable, *without_working_directory("hal.cli")]
    command += ["parity", "--backend", name, "--seed", str(arguments.seed)]
    if takes_simulate(name) and arguments.simulate:
        command.append("--simulate")
    if arguments.max_examples is not None:
        command += ["--max-examples", str(arguments.max_examples)]
    for op in arguments.op or ():
        command += ["--op", op]
    return command


def _write_pages(results: Sequence[Sequence[Row]], arguments: argparse.Namespace) -> None:
    if not (arguments.html or arguments.markdown):
        return
    from hal.testing.support import table
    from hal.testing.support_pages import html, markdown

    support = table(results)
    for path, render in ((arguments.html, html), (arguments.markdown, markdown)):
        if path:
            Path(path).write_text(render(support), encoding="utf-8")
            print(f"wrote {os.path.relpath(path)}")


def _todo(arguments: argparse.Namespace) -> int:
    import hal.ops  # noqa: F401  (defines the ops)
    from hal.core.registry import make
    from hal.testing.todo import measure_needs, todo

    backend = make(arguments.backend, options(arguments))
    print(todo(backend.name, list(backend.impls), measure_needs()))
    return 0


def _collectives(arguments: argparse.Namespace) -> int:
    from hal.testing.collectives import parity_collectives

    report = parity_collectives(
        arguments.backend,
        options(arguments),
        nproc=arguments.nproc or 4,
        on_row=lambda row: print(row, flush=True),
    )
    print(report.summary())
    if arguments.json:
        report.write_json(arguments.json)
    return 0 if report.ok else 1
