"""`hal report`: an HTML page that compares runs: curves, differences, options, memory, fallbacks and parity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .arguments import Parser, require_writable


def parser() -> Parser:
    """The options of `hal report`."""
    options = Parser("report", description=__doc__)
    add = options.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; the others are compared with the first")
    add("--parity", action="append", default=[], type=Path, metavar="FILE", help="results of hal parity --json")
    add("--output", type=Path, default=Path("report.html"), metavar="FILE", help="file to write (default report.html)")
    add("--title", default="HAL report", metavar="TEXT", help="title of the page")
    return options


def main(argv: Sequence[str]) -> int:
    """Runs `hal report` with these arguments."""
    from hal.model.apps.html_report.page import build_page
    from hal.model.apps.html_report.record import read_parity, read_runs
    from hal.model.common.atomic_files import write_text

    arguments = parser().parse_args(argv)
    require_writable("--output", arguments.output)
    page = build_page(read_runs(arguments.runs), [read_parity(p) for p in arguments.parity], arguments.title)
    write_text(arguments.output, page)
    print(f"{arguments.output} shows {len(arguments.runs)} run{'s' if len(arguments.runs) > 1 else ''}")
    return 0
