"""Rows as a text table, as Markdown, and as a self-contained HTML page with log-log plots of how time grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hal import pages

from .engine import Row, slope
from .runner import Results

_HEAD = ("what", "shape", "malloc", "peer", "ratio", "min..max", "goal", "ours", "of ceiling", "clean rounds")


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
    verdict = "" if r.goal is None else f"{_verdict(r, r.ratio_median >= r.goal)} {r.goal:g}x"
    share = "" if r.share_of_ceiling is None else f"{r.share_of_ceiling:.0%} of {r.ceiling}"
    if r.share_goal is not None:
        share += f" ({_verdict(r, (r.share_of_ceiling or 0.0) >= r.share_goal)} {r.share_goal:.0%})"
    spread = f"{r.ratio_min:.2f}..{r.ratio_max:.2f}"
    clean = f"{r.clean}/{r.rounds}"
    ours = quantity(r.ours, r.unit)
    return r.name, r.shape, r.allocator, r.peer, f"{r.ratio_median:.2f}x", spread, verdict, ours, share, clean


def _verdict(r: Row, reached: bool) -> str:
    """On one figure of a row, of which the other may reach its goal instead."""
    return "ok" if reached else "below" if r.met else "MISSED"


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [_HEAD, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


def layout(record: Mapping[str, Any]) -> str:
    """The results of `hal bench train` with a layout."""
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


def html(results: Results, conditions: str) -> str:
    """A self-contained page: conditions, missed goals, growth plots, and every row."""
    template = Path(__file__).with_name("report.html.j2")
    return pages.render(template, results=results, conditions=conditions, head=_HEAD, cells=_cells, plot=plot)


def plot(series: str, rows: Sequence[Row]) -> str:
    """One log-log plot as an <svg>: time over x, of HAL and its peers, with the exponent of growth in the legend."""
    lines: dict[str, dict[float, float]] = {"HAL": {}}
    for r in rows:
        if r.series == series:
            lines["HAL"][r.x] = r.ours
            lines.setdefault(r.peer, {})[r.x] = r.ours * r.ratio_median

    def draw(axes: Any) -> None:
        for name, line in lines.items():
            points = sorted(line.items())
            power = f" ~ x^{slope(points):.2f}" if len(points) > 2 else ""
            axes.plot(*zip(*points), "o-", markersize=4, label=name + power)
        axes.set_title(series, loc="left", fontweight="bold")
        axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(lines["HAL"]), minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter(lambda seconds, _: quantity(seconds, "s"))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)

    return pages.chart(draw, inches=(7.0, 3.4))
