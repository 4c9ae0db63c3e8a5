"""`hal config show`: what a `hal train` command line, its files and the environment come to, and where each value is
from. The work is in hal.model.configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_USAGE = """usage: hal config show [options of `hal train`]

Prints the merged configuration as YAML, every value with its origin: the command line, a file's key, a variable of the
environment, a default, or derived from others. What is wrong is refused as `hal train` would; what it would still
need (data, a vocabulary) is said at the end."""


def parser() -> argparse.ArgumentParser:
    """The options of `hal config show`, for completion."""
    from hal.model.arguments import parser as made

    top = argparse.ArgumentParser(prog="hal config")
    top.add_subparsers().add_parser("show", help="the merged configuration", parents=[made()], add_help=False)
    return top


def main(argv: Sequence[str]) -> int:
    """Runs `hal config` with these arguments."""
    if not argv or argv[0] in ("-h", "--help") or argv[1:2] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] != "show":
        print(f"hal config: there is no command '{argv[0]}'; commands: show", file=sys.stderr)
        return 2
    from hal.model.arguments import GROUPS, build, read
    from hal.model.checks import check_given
    from hal.model.configuration.show import describe

    for line in describe(build(read(argv[1:]), check_given), GROUPS):
        print(line)
    return 0
