"""Writes a run into a page: `hal bench all --json all.json`, then
`python -m hal.bench.harness.document all.json PAGE.md`.

Tables and growth plots of the page are replaced; its text is kept. A table follows a comment that defines its content:

    <!-- cases SUITE PATTERN -->  a line per case and allocator, a column per peer
    <!-- rows SUITE PATTERN -->   a line per comparison

PATTERN is a regular expression that must match the entire "name shape" of a case; a row goes into the first table that
matches. A plot is an SVG image whose alternative text is the name of its series; its file is written next to the page.
A table or plot without rows is an error, as is a row that is in no table of its suite; nothing is written in that case.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from . import report
from .engine import Row

_TABLE = re.compile(r"(<!-- (cases|rows) (\w+) (.+?) -->\n\n)(?:\|.*\n?)*")
_PLOT = re.compile(r"!\[(.+?)\]\((.+?\.svg)\)")


def _ratio(r: Row) -> str:
    spread = f" ({r.ratio_min:.1f}..{r.ratio_max:.1f})"
    if r.goal is None:
        return f"{r.ratio_median:.2f}x{spread}"
    if r.ratio_median >= r.goal:
        return f"{r.ratio_median:.2f}x ≥ {r.goal:g}{spread}"
    return _bold(r, f"{_below(r.ratio_median, r.goal, 2)}x < {r.goal:g}") + spread


def _share(r: Row) -> str:
    if r.share_of_ceiling is None:
        return ""
    share, of = f"{r.share_of_ceiling:.0%}", f" of {r.ceiling}"
    if r.share_goal is None:
        return share + of
    if r.share_of_ceiling >= r.share_goal:
        return f"{share} ≥ {r.share_goal:.0%}{of}"
    return _bold(r, f"{_below(100 * r.share_of_ceiling, 100 * r.share_goal, 0)}% < {r.share_goal:.0%}") + of


def _bold(r: Row, figure: str) -> str:
    """A figure below its goal, in bold unless the row's other figure reaches its goal."""
    return figure if r.met else f"**{figure}**"


def _below(value: float, goal: float, digits: int) -> str:
    """`value` with this many digits, or more if it would otherwise round to the goal that it missed."""
    while round(value, digits) >= goal and digits < 9:
        digits += 1
    return f"{value:.{digits}f}"


def _lines(kind: str, chosen: Sequence[Row]) -> list[tuple[str, ...]]:
    if kind == "rows":
        head = ("what", "shape", "malloc", "peer", "ratio", "share", "clean rounds")
        facts = ((r.name, r.shape, r.allocator, r.peer, _ratio(r), _share(r), f"{r.clean}/{r.rounds}") for r in chosen)
        return [head, *facts]
    peers = list(dict.fromkeys(r.peer for r in chosen))
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for r in chosen:
        by_peer = cases.setdefault((r.name, r.shape, r.allocator), {})
        if r.peer in by_peer:
            raise ValueError(f"two rows for {r.name} {r.shape} against {r.peer}, {r.allocator} malloc")
        by_peer[r.peer] = r
    lines = [("what", "shape", "malloc", *peers, "share")]
    for case, by_peer in cases.items():
        cells = (_ratio(by_peer[peer]) if peer in by_peer else "" for peer in peers)
        lines.append((*case, *cells, _share(next(iter(by_peer.values())))))
    return lines


def fill(page: str, rows: Sequence[Row]) -> str:
    """The page with its tables replaced by tables of `rows`. Raises ValueError as the module's docstring describes."""
    if len(_TABLE.findall(page)) != len(re.findall("<!-- (?:cases|rows) ", page)):
        raise ValueError("a comment `<!-- cases|rows SUITE PATTERN -->` must be a separate line before an empty line")
    suites = {suite for _, _, suite, _ in _TABLE.findall(page)}
    left = dict.fromkeys(i for i, r in enumerate(rows) if r.suite in suites)  # an ordered set

    def table(match: re.Match[str]) -> str:
        start, kind, suite, pattern = match.groups()
        chosen = [
            i for i in left if rows[i].suite == suite and re.fullmatch(pattern, f"{rows[i].name} {rows[i].shape}")
        ]
        if not chosen:
            raise ValueError(f"no row of suite {suite} is left for the table of {pattern!r}")
        for i in chosen:
            del left[i]
        head, *lines = _lines(kind, [rows[i] for i in chosen])
        return start + "".join(f"| {' | '.join(line)} |\n" for line in (head, tuple("---" for _ in head), *lines))

    filled = _TABLE.sub(table, page)
    if left:
        first = rows[next(iter(left))]
        raise ValueError(f"{len(left)} rows are in no table; the first: {first.suite} {first.name} {first.shape}")
    return filled


def main(results: str, page: str) -> None:
    """Rewrites the file `page` from the rows in the file `results`."""
    rows = [Row(**r) for r in json.loads(Path(results).read_text(encoding="utf-8"))]
    path = Path(page)
    text = fill(path.read_text(encoding="utf-8"), rows)
    plots = {file: series for series, file in _PLOT.findall(text)}
    missing = set(plots.values()) - {r.series for r in rows}
    if missing:
        raise ValueError(f"no rows for the plots of {', '.join(sorted(missing))}")
    for file, series in plots.items():
        (path.parent / file).write_text(report.plot(series, rows), encoding="utf-8")
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m hal.bench.harness.document RESULTS.json PAGE.md")
    main(*sys.argv[1:])
