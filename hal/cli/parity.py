"""`hal parity`: the conformance kit on one backend. Exit code 0 if nothing failed, 1 if something did.

A refused call is shown with its reasons, an op without implementation is listed (and fails the run only with
--require-all).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from hal.errors import HalError

from .arguments import Parser, add_backend, options


def main(argv: Sequence[str]) -> int:
    """Runs `hal parity` with these arguments."""
    parser = Parser("parity", description="Runs the conformance kit: every op of a backend against the references.")
    add_backend(parser, required=True)
    parser.add_argument("--op", action="append", metavar="OP", help="only this op; may be given several times")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as a JSON list")
    parser.add_argument(
        "--max-examples", type=int, default=None, metavar="N", help="random calls per implementation and dtype"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random calls")
    parser.add_argument("--collectives", action="store_true", help="the backend's communication instead of its ops")
    parser.add_argument("--nproc", type=int, metavar="N", help="processes for --collectives (default 4)")
    parser.add_argument("--require-all", action="store_true", help="fail if an op has no implementation")
    parser.add_argument(
        "--todo", action="store_true", help="list missing ops in the order in which a training step needs them"
    )
    arguments = parser.parse_args(argv)
    if arguments.max_examples is not None and arguments.max_examples < 0:
        parser.error(f"--max-examples must be 0 or more, got {arguments.max_examples}")
    if arguments.nproc is not None and (arguments.nproc < 1 or not arguments.collectives):
        parser.error("--nproc is a positive number of processes, and needs --collectives")
    if arguments.todo:
        return _todo(arguments)
    if arguments.collectives:
        return _collectives(arguments)
    try:
        from hal.testing import EXAMPLES, run_by_name
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise HalError("the conformance kit needs hypothesis: pip install hypothesis (or torch-hal[test])") from None

    began = time.monotonic()
    report = run_by_name(
        arguments.backend,
        options(arguments),
        ops=arguments.op,
        examples=EXAMPLES if arguments.max_examples is None else arguments.max_examples,
        seed=arguments.seed,
        on_row=lambda row: print(row, flush=True),
    )
    print(f"{report.summary()}\n{time.monotonic() - began:.0f} s")
    if arguments.json:
        report.write_json(arguments.json)
    return 0 if report.ok and not (arguments.require_all and report.missing) else 1


def _todo(arguments: argparse.Namespace) -> int:
    import hal.ops  # noqa: F401  (defines the ops)
    from hal.registry import make
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
