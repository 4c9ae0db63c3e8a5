"""The `hal` command. Each subcommand is a module of this package with a `main(argv) -> int`, imported when it is run.

Exit codes: 0 done, 1 failed, 2 wrong usage or input. An error that HAL raises on purpose, or an unreadable file, is one
line with a hint on stderr; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from hal.errors import HalError

COMMANDS = {
    "info": "the installed backends, the devices that each detects on this machine, and versions",
    "doctor": "one small call per op and backend: PASS, or the reason and a remedy",
    "why": "which implementation a call would run on, and why not the others",
    "parity": "the conformance kit: every op of a backend against the float64 reference",
    "bench": "speed relative to named peers and to the machine's limits",
    "config": "the configuration merged from options, files and the environment, with the origin of each value",
    "data": "convert text to training data, and inspect such data",
    "plan": "the parallel layouts of a model that fit on N devices, and the cost of each",
    "train": "train a GPT",
    "generate": "continue prompts with a trained model",
    "eval": "cloze accuracy, perplexity and validation loss of a trained model",
    "report": "runs side by side on one HTML page",
    "convert": "checkpoints between HAL, Hugging Face, Megatron-LM and megatron-core",
    "explain": "why an error occurs and what to do about it",
    "launch": "run a command on several processes or machines",
    "new-backend": "write an installable package that adds a backend",
    "completion": "write a shell script that completes commands, options, backends and ops",
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"usage: hal COMMAND [options]\n\n{lines}\n\n`hal COMMAND --help` shows a command's options."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here rather than when the interpreter ends, so that a closed pipe is no error
        return code
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HalError, OSError) as error:
        print(f"hal {arguments[0]}: {error}", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        import hal

        print(hal.__version__)
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean `hal {close[0]}`?" if close else ""
        print(f"hal: there is no command '{name}'.{hint} The commands are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"hal.cli.{name.replace('-', '_')}").main(rest))


if __name__ == "__main__":
    sys.exit(main())
