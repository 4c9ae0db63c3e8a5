"""`hal config`: the configuration that `hal train` would use, and its import from a launch script of another trainer.

It is implemented in hal.model.config.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_USAGE = """usage: hal config show [options of `hal train`]
       hal config import [--output FILE.yaml] [--number N] SCRIPT.sh [arguments of the script]

show prints the merged configuration as YAML, every value with its origin: the command line, a file's key, a variable of
the environment, a default, or derived from others. Errors are reported as by `hal train`; what it would still need
(data, a vocabulary) is listed at the end.

import EXECUTES the launch script of another trainer (Megatron-LM, MindSpeed-LLM, DeepSpeed, msrun) with bash and your
rights, to learn the command that it would start, and prints this command's options as YAML for `hal train --config`.
While the script runs, {launchers} only record
their arguments, and {stopped} do nothing; all other
programs that it calls run. Its working folder is a temporary one with copies of the small text files of the current
folder and of the script's. Comments in the YAML state how every option was handled: translated, noted because it
changes no result, or refused because HAL would train something else. With refused options the exit code is 1.

  --output FILE.yaml  write there instead of printing
  --number N          which of several recorded training commands, from 1"""


def parser() -> argparse.ArgumentParser:
    """The options of `hal config show` and `hal config import`, for completion."""
    from hal.model.config.command_line import parser as train_parser

    top = argparse.ArgumentParser(prog="hal config")
    commands = top.add_subparsers()
    commands.add_parser("show", help="the merged configuration", parents=[train_parser()], add_help=False)
    importer = commands.add_parser("import", help="the options of a launch script, as YAML", add_help=False)
    importer.add_argument("--output", metavar="FILE.yaml")
    importer.add_argument("--number", type=int, metavar="N")
    importer.add_argument("script", metavar="SCRIPT.sh")
    importer.add_argument("arguments", nargs=argparse.REMAINDER)
    return top


def main(argv: Sequence[str]) -> int:
    """Runs `hal config` with these arguments."""
    if not argv or argv[0] in ("-h", "--help") or argv[1:2] in (["-h"], ["--help"]):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "show":
        return _show(argv[1:])
    if argv[0] == "import":
        return _import(argv[1:])
    print(f"hal config: there is no command '{argv[0]}'; commands: show, import", file=sys.stderr)
    return 2


def _usage() -> str:
    from hal.model.config.launch_script import LAUNCHERS, STOPPED

    return _USAGE.format(launchers=", ".join(LAUNCHERS), stopped=", ".join(STOPPED))


def _show(argv: Sequence[str]) -> int:
    from hal.model.checkpoint.saved_config import adopt
    from hal.model.config.command_line import GROUPS, build, read
    from hal.model.config.show import describe
    from hal.model.config.validation import check_given

    values = read(argv, showing=True)
    adopt(values)
    for line in describe(build(values, check_given), GROUPS):
        print(line)
    return 0


def _import(argv: Sequence[str]) -> int:
    from hal.model.common.atomic_files import write_text
    from hal.model.config.imported import imported

    given = argparse.ArgumentParser(prog="hal config import", usage=_usage(), add_help=False, allow_abbrev=False)
    given.add_argument("--output")
    given.add_argument("--number", type=int)
    given.add_argument("script")
    given.add_argument("arguments", nargs=argparse.REMAINDER)
    options = given.parse_args(list(argv))
    print(f"hal config import: executing {options.script} with its launchers replaced by recorders", file=sys.stderr)
    text, refused = imported(Path(options.script), options.arguments, options.number)
    if options.output is None:
        print(text)
    else:
        write_text(Path(options.output), text + "\n")
    if refused:
        print(f"hal config import: {refused} refused; see the comments of the YAML", file=sys.stderr)
    return int(bool(refused))
