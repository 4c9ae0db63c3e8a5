"""Shared by the commands: their parser, and the options that choose a backend.

Wrong usage is one line with a hint and exit code 2, as everywhere in `hal`.
"""

from __future__ import annotations

import argparse
import errno
import inspect
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from hal.core.registry import backend_names, load
from hal.errors import HalError


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and without abbreviations, which an option added later would make ambiguous."""

    def __init__(self, command: str, **kwargs: Any) -> None:
        super().__init__(prog=f"hal {command}", allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        if message == "the following arguments are required: --backend":
            message = f"no backend was chosen; give --backend, one of {', '.join(backend_names())}"
        print(f"{self.prog}: {message}. `{self.prog} --help` shows the options.", file=sys.stderr)
        sys.exit(2)


def add_backend(parser: Parser, *, required: bool, default_from_environment: bool = True) -> None:
    """Adds --backend (default: HAL_BACKEND, if `default_from_environment`) and --simulate."""
    default = (os.environ.get("HAL_BACKEND") or None) if default_from_environment else None
    parser.add_argument(
        "--backend",
        metavar="NAME",
        default=default,
        required=required and default is None,
        help=f"one of: {', '.join(backend_names())}",
    )
    parser.add_argument("--simulate", action="store_true", help="run the backend on its simulator")


def parser_of_backends(command: str, description: str) -> Parser:
    """The parser of a command about all backends, or the one of --backend."""
    parser = Parser(command, description=description)
    add_backend(parser, required=False, default_from_environment=False)
    return parser


def options(arguments: argparse.Namespace) -> dict[str, object]:
    """Constructor options of the backend, from the command line."""
    return {"simulate": True} if arguments.simulate else {}


def require_writable(option: str, path: str | Path | None) -> None:
    """Raises HalError unless the file given with `option`, if any, can be written, so that this is known in advance."""
    if path is None:
        return
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists():
            target.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=target.absolute().parent).close()
    except OSError as error:
        raise HalError(f"{option} {path} cannot be written ({error.strerror}); give another file") from None


def takes_simulate(name: str) -> bool:
    """Whether the backend `name` has a simulator. Raises what loading it raises."""
    return "simulate" in inspect.signature(load(name)).parameters
