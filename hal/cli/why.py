"""`hal why OP`: which implementation a call would run on, and why not the others. Runs nothing.

Works without the device: a backend's why_not is pure, and the call has meta tensors. With --backends the answers are
shown side by side. Exit code 0 if the call would run (on all of them), 1 if every implementation of one refuses it.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import hal.ops  # noqa: F401  (defines the ops)
from hal.core.backend import Backend
from hal.core.dispatch import Why, activated, why
from hal.core.op import OPS, Op
from hal.core.registry import make, probed

from .arguments import Parser, add_backend, options, takes_simulate
from .meta_calls import add_call, call, shown


def parser() -> Parser:
    """The options of `hal why`."""
    command_parser = Parser("why", description="Which implementation a call would run on, and why not the others.")
    command_parser.add_argument("op", metavar="OP", help=f"one of: {', '.join(OPS)}")
    add_backend(command_parser, required=False)
    command_parser.add_argument("--backends", metavar="A,B,...", help="compare these, side by side")
    command_parser.add_argument("--fallback", default="error", choices=("error", "reference"))
    command_parser.add_argument("--deterministic-mode", action="store_true", help="equal calls give equal bits")
    command_parser.add_argument("--rng", choices=("hal", "vendor"), default="hal", help="random numbers of dropout")
    command_parser.add_argument("--pin", metavar="ID", help="the only implementation allowed")
    add_call(command_parser)
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Runs `hal why` with these arguments."""
    command_parser = parser()
    arguments = command_parser.parse_args(argv)
    if arguments.op not in OPS:
        command_parser.error(f"no op is called '{arguments.op}'; ops: {', '.join(OPS)}")
    compared = [name for name in (arguments.backends or "").split(",") if name]
    if arguments.backends is not None and (len(set(compared)) < 2 or arguments.pin):
        command_parser.error("--backends compares two or more, each named once, and takes no --pin")
    if not compared and arguments.backend is None:
        command_parser.error("the following arguments are required: --backend")
    op = OPS[arguments.op]
    args, kwargs = call(op, arguments)
    print(shown(args, kwargs, op))
    answers = []
    for name in compared or [arguments.backend]:
        # With --backends, --simulate applies to those that have a simulator.
        given: dict[str, object] = {**(options(arguments) if not compared or takes_simulate(name) else {})}
        if arguments.rng != "hal":
            given["rng"] = arguments.rng
        backend = make(name, given, deterministic=arguments.deterministic_mode)
        answers.append(_ask(backend, op, args, kwargs, arguments.fallback, arguments.pin))
        probe = probed(backend)
        if not probe.ok:
            print(f"hal why: backend '{name}' cannot run here: {probe.reason}", file=sys.stderr)
    print(side_by_side(answers) if compared else answers[0])
    return 0 if all(a.chosen is not None for a in answers) else 1


def _ask(backend: Backend, op: Op[Any, Any], args: Any, kwargs: Any, fallback: str, pin: str | None) -> Why:
    with activated(backend, fallback=fallback, pin={op.name: pin} if pin else {}):
        return why(op, *args, **kwargs)


def side_by_side(answers: Sequence[Why], width: int | None = None) -> str:
    """The answers in columns that fill the terminal. A long reason is wrapped, never truncated."""
    total = width or shutil.get_terminal_size((120, 24)).columns
    column = max(24, (total - 3 * (len(answers) - 1)) // len(answers))
    columns = [[line for text in _lines(a) for line in _wrapped(text, column)] for a in answers]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join(" | ".join(f"{cell:<{column}}" for cell in row).rstrip() for row in rows)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="    ", drop_whitespace=True) or [""]


def _lines(answer: Why) -> list[str]:
    head, *rest = str(answer).splitlines()
    title = f"{answer.backend}: {'runs on ' + answer.chosen if answer.chosen else 'refused'}"
    return [title, *(line.strip() for line in rest)] if rest else [title, head]
