"""`hal report`: one HTML page on one or more runs: curves over each other, differences, memory, fallbacks, parity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .arguments import Parser, require_writable


def parser() -> Parser:
    """The options of `hal report`."""
    made = Parser("report", description=__doc__)
    add = made.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder; others are compared with the first")
    add("--parity", action="append", default=[], type=Path, metavar="FILE", help="results of hal parity --json")
    add("--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default report.html)")
    add("--title", default="HAL report", metavar="TEXT", help="its title")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs `hal report` with these arguments."""
    from hal.model.files import write_text
    from hal.model.reporting.page import build_page
    from hal.model.reporting.record import read_parity, read_runs

    arguments = parser().parse_args(argv)
    require_writable("--output", arguments.output)
    page = build_page(read_runs(arguments.runs), [read_parity(p) for p in arguments.parity], arguments.title)
    write_text(arguments.output, page)
    print(f"{arguments.output} shows {len(arguments.runs)} run{'s' if len(arguments.runs) > 1 else ''}")
    return 0
