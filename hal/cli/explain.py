"""`hal explain ERROR`: why an error exists, its usual causes and what to do, from the page on errors.

The page (docs/errors.md) is part of the installed package, so it can be read where the documentation is not at hand.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from hal.errors import HalError

from .arguments import Parser

PAGE = Path(__file__).resolve().parents[1] / "errors.md"


def sections() -> dict[str, str]:
    """Name of an error -> its section of the page, in the page's order."""
    parts = re.split(r"^## (\w+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2])}


def parser() -> Parser:
    """The options of `hal explain`."""
    command_parser = Parser("explain", description="Explains an error; without a name, lists them.")
    command_parser.add_argument("error", nargs="?", metavar="ERROR", help="the name that a message ends with")
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Runs `hal explain` with these arguments."""
    name = parser().parse_args(argv).error
    known = sections()
    if name is None:
        print("\n".join(f"{error}: {_first_sentence(text)}" for error, text in known.items()))
        return 0
    by_lower = {error.lower(): error for error in known}
    if name.lower() not in by_lower:
        close = difflib.get_close_matches(name.lower(), by_lower, n=1)
        hint = f" Did you mean {by_lower[close[0]]}?" if close else ""
        raise HalError(f"there is no error '{name}'.{hint} The errors are {', '.join(known)}.")
    print(known[by_lower[name.lower()]])
    return 0


def _first_sentence(text: str) -> str:
    return " ".join(re.split(r"(?<=\.)\s", text, maxsplit=1)[0].split())
