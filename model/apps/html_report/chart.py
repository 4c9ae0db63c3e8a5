"""Curves of several runs over their iterations. Colours and dashes distinguish the runs.

The colours are those of Okabe and Ito, which readers with a colour vision deficiency can distinguish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from hal import pages

from .record import Rows

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a00", "#7a5195")
_DASHES = ("solid", "dashed", "dotted")


def style(run: int) -> tuple[str, str]:
    """The colour of a run, by its number, and its line style: a name that matplotlib and CSS share."""
    # Consecutive runs also differ in their dashes: where curves coincide, the lower one shows in the gaps of the upper.
    return COLOURS[run % len(COLOURS)], _DASHES[(run + 2 * (run // len(COLOURS))) % len(_DASHES)]


def curves(
    runs: Sequence[Rows],
    label: str,
    *,
    first: int = 0,
    dots: Sequence[Rows] = (),
    smooth: bool = True,
    log: bool = False,
    from_zero: bool = False,
) -> Markup | None:
    """A chart with one curve per run, numbered from `first`; None if there is nothing to draw.

    dots: further rows of each run, drawn as markers. smooth: long curves are drawn as running means over their faint
    original. log: a logarithmic axis, without the values <= 0. from_zero: the axis begins at 0.
    """
    if log:
        runs = [[(n, y) for n, y in rows if y > 0] for rows in runs]
    if not any(runs) and not any(dots):
        return None

    def draw(axes: Any) -> None:
        for number, rows in enumerate(runs, first):
            colour, dashes = style(number)
            window = len(rows) // 60 if smooth else 1
            if window > 1:
                axes.plot(*zip(*rows), color=colour, linewidth=1.0, alpha=0.3)
                rows = running_mean(rows, window)
            # A line through one point is invisible.
            marker = {"marker": "o", "markersize": 4} if len(rows) == 1 else {}
            if rows:
                axes.plot(*zip(*rows), color=colour, linestyle=dashes, linewidth=1.4, **marker)
        for number, rows in enumerate(dots, first):
            if rows:
                axes.plot(*zip(*rows), "o-", color=style(number)[0], markersize=4, linewidth=0.8)
        axes.set(xlabel="iteration", ylabel=label, **({"yscale": "log"} if log else {}))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.01)
        if from_zero:
            axes.set_ylim(bottom=0)

    return pages.chart(draw)


def running_mean(rows: Rows, window: int) -> Rows:
    """The centred running mean over `window` values (rounded up to an odd number), and over fewer at the ends."""
    half, index = window // 2, np.arange(len(rows))
    sums = np.concatenate(([0.0], np.cumsum([y for _, y in rows])))
    start, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(rows))
    return [(n, float(mean)) for (n, _), mean in zip(rows, (sums[end] - sums[start]) / (end - start))]
