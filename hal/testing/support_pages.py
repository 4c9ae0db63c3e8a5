"""The table of results as self-contained HTML with a heat map, and as Markdown.

Both have the same content and are made from rows alone, so that equal results give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hal import pages

from .support import Cell, Support

LEGEND = (
    "A number is the worst error of all calls, in units of the tolerance of that op and dtype (1 = just allowed), "
    "against the reference in float64, forward and backward, over all implementations. golden_loss: 20 training steps."
)
SIMULATOR = "simulator: the backend's own code ran, but not on its device"


def html(support: Support) -> str:
    """A self-contained page."""
    return pages.render(
        Path(__file__).with_name("support.html.j2"),
        support=support,
        heat=heat,
        shown=shown,
        legend=LEGEND,
        simulator=SIMULATOR,
    )


def heat(cell: Cell) -> str:
    """The CSS class of a cell: h0 to h4 by quarters of the tolerance, or its status."""
    if cell.status in ("fail", "waived", "declined", "none", ""):
        return cell.status or "empty"
    return f"h{min(4, int((cell.worst or 0.0) * 4))}"


def shown(cell: Cell) -> str:
    """The text of a cell."""
    number = "" if cell.worst is None else f"{cell.worst:.2g}"
    text = {
        "pass": number or "pass",
        "waived": f"{number} waived",
        "fail": f"FAIL {number}".strip(),
        "declined": "declined",
        "none": "-",
        "": "",
    }[cell.status]
    return f"{text} stand-in" if cell.stand_in and cell.status in ("pass", "waived") else text


def markdown(support: Support) -> str:
    """The same content for docs/support, which `make support` writes."""
    return "\n".join(_markdown(support)) + "\n"


def _markdown(support: Support) -> Iterator[str]:
    yield "# What each backend supports\n"
    yield "Made from `results/` by `make support`; do not edit.\n"
    yield f"{LEGEND} {SIMULATOR[0].upper()}{SIMULATOR[1:]}. `-`: no implementation.\n"
    heads = [f"{c.backend} ({c.where})" for c in support.columns]
    yield f"| op | dtype | {' | '.join(heads)} |"
    yield f"|---|---|{'---|' * len(heads)}"
    for line in support.lines:
        texts = (shown(support.cell(line, i)) for i in range(len(support.columns)))
        cells = " | ".join(f"**{t}**" if t.startswith("FAIL") else t for t in texts)
        yield f"| {line[0]} | {line[1]} | {cells} |"
    for i, column in enumerate(support.columns):
        yield f"\n## {column.backend} ({column.where})\n"
        if column.absent:
            yield f"Not run: {_plain(column.absent)}"
            continue
        yield "; ".join(f"{name}: {_plain(value)}" for name, value in column.facts.items()) + "."
        if support.missing(i):
            yield f"\nNo implementation: {', '.join(support.missing(i))}."
        for title, items in (
            ("Failures", support.failures(i)),
            ("Waivers", support.waivers(i)),
            ("Stand-ins", support.stand_ins(i)),
            ("Declined calls", support.declines(i)),
        ):
            if items:
                yield f"\n{title}:\n"
                yield from (f"- {_plain(what)}: {_plain(reason)}" for what, reason in items)


def _plain(text: str) -> str:
    """Text with Markdown's special characters escaped."""
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
