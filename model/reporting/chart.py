"""Curves as SVG: several series over one axis, thinned to what a screen can show, without losing a spike.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; dashes tell series apart as well.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .record import Rows

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a00", "#7a5195")
_DASHES = ("", "8 4", "2 3", "8 3 2 3")
WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 34
_MOST_POINTS = 700


@dataclass(frozen=True)
class Series:
    """A curve. number: which colour. markers: dots instead of a line alone. faint: drawn lightly, not in the legend."""

    name: str
    rows: Rows
    number: int
    markers: bool = False
    faint: bool = False


def style(number: int) -> tuple[str, str]:
    """(colour, dash pattern) of a series' number."""
    # Where equal curves lie on each other, the lower shows in the gaps.
    return COLOURS[number % len(COLOURS)], _DASHES[(number + number // len(COLOURS)) % len(_DASHES)]


def chart(series: Sequence[Series], *, y_label: str, log: bool = False, from_zero: bool = False) -> str:
    """An <svg>, or a remark that there is nothing to draw. log: a logarithmic axis (values <= 0 are left out)."""
    kept = [
        Series(s.name, [(n, y) for n, y in s.rows if not log or y > 0], s.number, s.markers, s.faint) for s in series
    ]
    kept = [s for s in kept if s.rows]
    if not kept:
        return '<p class="none">nothing was recorded</p>'
    xs = [n for s in kept for n, _ in s.rows]
    ys = [y for s in kept for _, y in s.rows]
    x0, x1 = min(xs), max(xs)
    y0, y1, ticks = _axis(min(ys), max(ys), log=log, from_zero=from_zero)

    def px(n: float) -> float:
        share = (n - x0) / (x1 - x0) if x1 > x0 else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        low, high, at = (math.log10(v) for v in (y0, y1, y)) if log else (y0, y1, y)
        return HEIGHT - _BOTTOM - (at - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(y_label, quote=True)}" '
        f'data-x0="{x0}" data-x1="{x1}" data-left="{_LEFT}" data-right="{WIDTH - _RIGHT}">'
    ]
    for tick in ticks:
        y = py(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for tick in _steps(x0, x1, 8, whole=True):
        parts.append(f'<text x="{px(tick):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{_short(tick)}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 3}" text-anchor="middle">iteration</text>')
    turned = f'transform="rotate(-90 12 {HEIGHT / 2:.0f})"'
    parts.append(f'<text x="12" y="{HEIGHT / 2:.0f}" text-anchor="middle" {turned}>{html.escape(y_label)}</text>')
    for s in kept:
        parts.append(_curve(s, px, py))
    return "".join([*parts, "</svg>"])


def smooth(rows: Rows, window: int) -> Rows:
    """A running mean over `window` rows, centred; the rows themselves where the window is 1."""
    if window <= 1:
        return rows
    sums = [0.0]
    for _, y in rows:
        sums.append(sums[-1] + y)
    half = window // 2
    found = []
    for at, (n, _) in enumerate(rows):
        first, last = max(0, at - half), min(len(rows), at + half + 1)
        found.append((n, (sums[last] - sums[first]) / (last - first)))
    return found


def _curve(s: Series, px: object, py: object) -> str:
    assert callable(px) and callable(py)
    colour, dash = style(s.number)
    dashes = f' stroke-dasharray="{dash}"' if dash and not s.faint else ""
    points = " ".join(f"{px(n):.1f},{py(y):.1f}" for n, y in thin(s.rows))
    light = ' stroke-opacity="0.25"' if s.faint else ""
    drawn = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}{light}/>'
    if s.markers or len(s.rows) == 1:
        drawn += "".join(f'<circle cx="{px(n):.1f}" cy="{py(y):.1f}" r="3" fill="{colour}"/>' for n, y in s.rows)
    return drawn


def thin(rows: Rows, most: int = _MOST_POINTS) -> Rows:
    """At most about `most` rows: of each stretch its lowest and its highest, in order, so that spikes stay."""
    if len(rows) <= most:
        return rows
    width = len(rows) / (most / 2)
    found = []
    for n in range(most // 2):
        stretch = rows[int(n * width) : int((n + 1) * width)]
        found += sorted({min(stretch, key=lambda r: r[1]), max(stretch, key=lambda r: r[1])})
    return found


def _axis(low: float, high: float, *, log: bool, from_zero: bool) -> tuple[float, float, list[float]]:
    """(lowest, highest, ticks) of an axis that shows low..high."""
    if log:
        a, b = math.floor(math.log10(low)), math.ceil(math.log10(high))
        b = max(b, a + 1)
        step = max(1, (b - a) // 6)
        return 10.0**a, 10.0**b, [10.0**e for e in range(a, b + 1, step)]
    low = min(0.0, low) if from_zero else low
    if high - low <= 1e-8 * max(abs(low), abs(high)):  # alike, or so near that ticks between them would round to others
        low, high = low - abs(low) * 0.1 - 0.5, high + abs(high) * 0.1 + 0.5
    margin = 0.04 * (high - low)
    low, high = (low if from_zero else low - margin), high + margin
    return low, high, _steps(low, high, 6)


def _steps(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers in low..high, at most `most` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    step = max(1.0, round(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    """A tick's label."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1000.0 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"
