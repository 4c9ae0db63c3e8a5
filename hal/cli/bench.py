"""`hal bench`: runs benchmark suites and prints, writes or checks their ratios."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

SUITES = ("dispatch",)


def main(argv: Sequence[str]) -> int:
    """Exit code 1 if --check and a ratio is below its goal."""
    parser = argparse.ArgumentParser(prog="hal bench", description=__doc__)
    parser.add_argument("suite", nargs="?", default="all", choices=[*SUITES, "all"], help="default: all")
    parser.add_argument("--json", metavar="F", help="write the rows to F")
    parser.add_argument("--check", action="store_true", help="fail when a ratio is below its goal")
    options = parser.parse_args(argv)
    from hal.bench.engine import table

    rows = []
    for suite in SUITES if options.suite == "all" else (options.suite,):
        rows += importlib.import_module(f"hal.bench.{suite}").run()
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps([r.as_dict() for r in rows], indent=1) + "\n")
    missed = [r for r in rows if r.missed]
    for r in missed:
        print(
            f"below its goal: {r.name} {r.shape} against {r.peer}: {r.ratio_median:.2f} < {r.goal:g}", file=sys.stderr
        )
    return 1 if options.check and missed else 0
