"""Rows as a text table, and as one self-contained HTML page with log-log plots of how time grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .engine import Row, slope
from .runner import Found

_HEAD = ("what", "shape", "malloc", "peer", "ratio", "min..max", "goal", "ours", "of ceiling", "clean rounds")
_COLORS = ("#0b6e4f", "#c1440e", "#3a5a9b", "#8a5a00", "#7b3f8c", "#555")


def quantity(value: float, unit: str) -> str:
    """A time or an amount of memory with a unit that suits its size."""
    if unit == "B":
        return f"{value / 2**20:.4g} MiB"
    if not unit:
        return f"{value:.2%}"
    for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= factor:
            return f"{value / factor:.4g} {name}"
    return f"{value / 1e-9:.4g} ns"


def _cells(r: Row) -> tuple[str, ...]:
    verdict = "" if r.goal is None else f"{'ok' if r.ratio_median >= r.goal else 'MISSED'} {r.goal:g}x"
    share = "" if r.share_of_ceiling is None else f"{r.share_of_ceiling:.0%} of {r.ceiling}"
    if r.share_goal is not None:
        share += f" ({'ok' if (r.share_of_ceiling or 0) >= r.share_goal else 'MISSED'} {r.share_goal:.0%})"
    spread = f"{r.ratio_min:.2f}..{r.ratio_max:.2f}"
    clean = f"{r.clean}/{r.rounds}"
    ours = quantity(r.ours, r.unit)
    return r.name, r.shape, r.allocator, r.peer, f"{r.ratio_median:.2f}x", spread, verdict, ours, share, clean


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [_HEAD, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


def layout(record: Mapping[str, Any]) -> str:
    """What `hal bench train` measured under a layout."""
    times = record["seconds_per_step"]
    simulated = " (simulated)" if record["simulated"] else ""
    lines = [
        f"{record['conditions']}; backend {record['backend']}{simulated}",
        f"{record['parameters']:,} parameters, {record['steps']} steps of "
        + "..".join(quantity(times[k], "s") for k in ("min", "median", "max")),
        f"{record['tokens_per_second']:,.0f} tokens/s, {record['model_flops_per_second'] / 1e9:,.2f} model GFLOP/s",
    ]
    for rank in record["ranks"]:
        place = " ".join(f"{k} {n}" for k, n in rank.items() if k not in ("rank", "peak_memory_bytes", "ep"))
        lines.append(f"rank {rank['rank']}  {place}  peak memory {quantity(rank['peak_memory_bytes'], 'B')}")
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [_HEAD, tuple("---" for _ in _HEAD), *map(_cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def html(found: Found, conditions: str) -> str:
    """A page that needs nothing else: conditions, misses, growth plots, and every row."""
    suites = dict.fromkeys(r.suite for r in found.rows)
    parts = [f"<h1>hal bench</h1><p>{escape(conditions)}</p>", _LEGEND]
    parts.append(f"<p><b>{found.goals - len(found.misses)} of {found.goals} goals met.</b></p>")
    if found.misses:
        parts.append("<ul class=missed>" + "".join(f"<li>{escape(m)}</li>" for m in found.misses) + "</ul>")
    for suite in suites:
        rows = [r for r in found.rows if r.suite == suite]
        parts.append(f"<h2>{escape(suite)}</h2>")
        parts += [plot(series, rows) for series in dict.fromkeys(r.series for r in rows if r.series)]
        head = "".join(f"<th>{h}</th>" for h in _HEAD)
        body = "".join(
            f"<tr{' class=missed' if r.misses else ''}>{''.join(f'<td>{escape(c)}</td>' for c in _cells(r))}</tr>"
            for r in rows
        )
        parts.append(f"<div class=wide><table><tr>{head}</tr>{body}</table></div>")
    if found.absent:
        items = "".join(
            f"<li>{escape(f'{a.name} {a.shape} against {a.peer} ({a.allocator} malloc): {a.reason}')}</li>"
            for a in found.absent
        )
        parts.append(f"<h2>not measured</h2><ul>{items}</ul>")
    return (
        f'<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>hal bench</title><style>{_STYLE}</style><main>{''.join(parts)}</main></html>\n"
    )


_LEGEND = (
    "<p>ratio = the peer's time (or memory) / HAL's, measured in turn in the same rounds; median, then min..max. "
    "malloc: <i>default</i> = glibc as it comes, <i>pooled</i> = told to keep what is freed; both sides of a ratio run "
    "under the same. of ceiling = HAL's rate / what the machine reached in the same rounds. clean rounds = rounds in "
    "which no other process used the processors; only those count if there are three.</p>"
)
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;color:#222;background:#fff;margin:0}main{max-width:78rem;margin:0 auto;"
    "padding:1rem}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;white-space:nowrap}"
    "td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:left}.missed{color:#b00020}"
    "svg{max-width:100%;height:auto;margin:0 1.5rem 1rem 0}"
)


def plot(series: str, rows: Sequence[Row]) -> str:
    """One log-log plot: time over x, ours and every peer, with the exponent of growth beside each name."""
    lines: dict[str, dict[float, float]] = {"HAL": {}}
    for r in rows:
        if r.series == series:
            lines["HAL"][r.x] = r.ours
            lines.setdefault(r.peer, {})[r.x] = r.ours * r.ratio_median
    points = [p for line in lines.values() for p in line.items()]
    (x0, x1), (y0, y1) = (_decades([p[i] for p in points], base) for i, base in ((0, 2.0), (1, 10.0)))
    left, top, width, height = 70.0, 34.0, 330.0, 230.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + width * math.log(x / x0) / math.log(x1 / x0),
            top + height * (1.0 - math.log(y / y0) / math.log(y1 / y0)),
        )

    parts = [f'<text x="{left}" y="18" font-weight="600">{escape(series)}</text>']
    for x in sorted({p[0] for p in points}):
        px, py = at(x, y0)
        parts.append(f'<line x1="{px:.1f}" y1="{top}" x2="{px:.1f}" y2="{py:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{px:.1f}" y="{py + 16:.1f}" text-anchor="middle">{x:g}</text>')
    for k in range(round(math.log10(y1 / y0)) + 1):
        y = y0 * 10.0**k
        px, py = at(x0, y)
        parts.append(f'<line x1="{px:.1f}" y1="{py:.1f}" x2="{left + width}" y2="{py:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{px - 6:.1f}" y="{py + 4:.1f}" text-anchor="end">{quantity(y, "s")}</text>')
    for i, (name, line) in enumerate(lines.items()):
        color, ordered = _COLORS[i % len(_COLORS)], sorted(line.items())
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in ordered))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in (at(*p) for p in ordered)]
        power = f" ~ x^{slope(ordered):.2f}" if len(ordered) > 2 else ""
        y = top + 14 + 17 * i
        parts.append(f'<text x="{left + width + 14}" y="{y}" fill="{color}">{escape(name + power)}</text>')
    return (
        f'<svg viewBox="0 0 580 296" width="580" role="img" aria-label="{escape(series)}" '
        f'font-family="system-ui,sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def _decades(values: Sequence[float], base: float) -> tuple[float, float]:
    """The powers of `base` around the values, at least one apart."""
    low, high = math.floor(math.log(min(values), base) + 1e-9), math.ceil(math.log(max(values), base) - 1e-9)
    return base**low, base ** max(high, low + 1)
