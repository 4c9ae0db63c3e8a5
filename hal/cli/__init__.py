"""The `hal` command. Each subcommand is a module of this package with a `main(argv) -> int`, imported when asked for.

Exit codes: 0 done, 1 failed, 2 wrong usage or input. An error HAL raises on purpose, or an unreadable file, is one line
with a hint on stderr; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from hal.errors import HalError

COMMANDS = {
    "info": "the backends known here, what each finds on this machine, and versions",
    "doctor": "one tiny call per op and backend: PASS, or the reason and what would help",
    "why": "which implementation a call would run on, and why not the others",
    "parity": "the conformance kit: every op of a backend against the float64 reference",
    "bench": "ratios against named peers and against the machine's limits",
    "config": "what options, files and the environment come to, and where each value is from",
    "data": "text into training data, and what such data holds",
    "plan": "which layouts of a model fit on N devices, and what each costs",
    "train": "train a GPT",
    "generate": "continue prompts with a trained model",
    "eval": "cloze accuracy, perplexity and validation loss of a trained model",
    "serve": "a trained model behind an OpenAI-style completions endpoint",
    "report": "runs side by side on one HTML page",
    "convert": "checkpoints between HAL, Hugging Face, Megatron-LM and megatron-core",
    "launch": "run a command on several processes or machines",
    "new-backend": "write an installable package that adds a backend",
    "completion": "a script for the shell that completes commands, options, backends and ops",
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"usage: hal COMMAND [options]\n\n{lines}\n\n`hal COMMAND --help` shows a command's options."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        import hal

        print(hal.__version__)
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"hal: there is no command '{name}'; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(f"hal.cli.{name.replace('-', '_')}").main(rest))
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HalError, OSError) as error:
        print(f"hal {name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
