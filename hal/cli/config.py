"""`hal config show`: the configuration that `hal train` would use, with the origin of each value.

It is implemented in hal.model.config.formats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_USAGE = """usage: hal config show [options of `hal train`]

Prints the merged configuration as YAML, every value with its origin: the command line, a file's key, a variable of the
environment, a default, or derived from others. Errors are reported as by `hal train`; what it would still need (data, a
vocabulary) is listed at the end."""


def parser() -> argparse.ArgumentParser:
    """The options of `hal config show`, for completion."""
    from hal.model.config.command_line import parser as train_parser

    top = argparse.ArgumentParser(prog="hal config")
    top.add_subparsers().add_parser("show", help="the merged configuration", parents=[train_parser()], add_help=False)
    return top


def main(argv: Sequence[str]) -> int:
    """Runs `hal config` with these arguments."""
    if not argv or argv[0] in ("-h", "--help") or argv[1:2] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] != "show":
        print(f"hal config: there is no command '{argv[0]}'; commands: show", file=sys.stderr)
        return 2
    from hal.model.config.command_line import GROUPS, build, read
    from hal.model.config.show import describe
    from hal.model.config.validation import check_given

    for line in describe(build(read(argv[1:], showing=True), check_given), GROUPS):
        print(line)
    return 0
