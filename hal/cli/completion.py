"""`hal completion SHELL`: a script that makes the shell complete commands, options, backends and ops.

bash: hal completion bash > ~/.local/share/bash-completion/completions/hal
zsh:  hal completion zsh > a folder of $fpath/_hal

The script contains the names of the present backends and ops; write it again after installing a backend.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from hal.core.registry import backend_names
from hal.errors import HalError

from . import COMMANDS
from .arguments import Parser

SHELLS = ("bash", "zsh", "fish", "tcsh")


def parser() -> Parser:
    """The options of `hal completion`."""
    command_parser = Parser("completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_parser.add_argument("shell", choices=SHELLS)
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Runs `hal completion` with these arguments."""
    arguments = parser().parse_args(argv)
    try:
        import shtab
    except ModuleNotFoundError:
        raise HalError("completion scripts are written by shtab: pip install shtab (or torch-hal[train])") from None
    print(shtab.complete(tree(), arguments.shell))
    return 0


def tree() -> argparse.ArgumentParser:
    """One parser for all commands. A command without a `parser()` is completed by name only."""
    top = argparse.ArgumentParser(prog="hal")
    top.add_argument("--version", action="store_true")
    commands = top.add_subparsers(dest="command")
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"hal.cli.{name.replace('-', '_')}")
        make_parser = getattr(module, "parser", None)
        parents = [_with_choices(make_parser())] if make_parser else []
        # A parent brings its own --help.
        commands.add_parser(name, help=text, parents=parents, add_help=not parents)
    return top


def _with_choices(command_parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds choices to a parser for completion. The commands omit them because their own errors are more helpful."""
    from shtab import FILE

    import hal.ops  # noqa: F401  (defines the ops)
    from hal.core.op import OPS

    for action in command_parser._actions:
        if "--backend" in action.option_strings:
            action.choices = list(backend_names())
        elif "--op" in action.option_strings or action.dest == "op":
            action.choices = list(OPS)
        elif action.type is Path or str(action.metavar).startswith(("FILE", "F", "DIR")):
            action.complete = FILE  # type: ignore[attr-defined]
    return command_parser
