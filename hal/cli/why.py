"""`hal why OP`: which implementation a call would run on, and why not the others. Runs nothing.

Works without the device: a backend's why_not is pure, and the call is made of meta tensors. Exit code 0 if the call
would run, 1 if every implementation refuses it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import hal.ops  # noqa: F401  (defines the ops)
from hal.dispatch import activated, why
from hal.op import OPS
from hal.registry import make

from .arguments import Parser, add_backend, options
from .calls import add_call, call, shown


def main(argv: Sequence[str]) -> int:
    """Runs `hal why` with these arguments."""
    parser = Parser("why", description="Which implementation a call would run on, and why not the others.")
    parser.add_argument("op", metavar="OP", help=f"one of: {', '.join(OPS)}")
    add_backend(parser, required=True)
    parser.add_argument("--fallback", default="error", choices=("error", "reference"))
    parser.add_argument("--pin", metavar="ID", help="the only implementation allowed")
    add_call(parser)
    arguments = parser.parse_args(argv)
    if arguments.op not in OPS:
        parser.error(f"no op is called '{arguments.op}'; ops: {', '.join(OPS)}")
    op = OPS[arguments.op]
    args, kwargs = call(op, arguments)
    backend = make(arguments.backend, options(arguments))
    pin = {op.name: arguments.pin} if arguments.pin else {}
    with activated(backend, fallback=arguments.fallback, pin=pin):
        answer = why(op, *args, **kwargs)
    print(f"{shown(args, kwargs, op)}\n{answer}")
    probe = backend.probe()
    if not probe.ok:
        print(f"hal why: backend '{backend.name}' cannot run here: {probe.reason}", file=sys.stderr)
    return 0 if answer.chosen is not None else 1
