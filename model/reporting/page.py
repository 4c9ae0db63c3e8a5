"""The page: curves of all runs over each other, their differences, memory, fallbacks, and parity. One file, no network.

Whatever comes from a file is escaped; the page forbids itself to load anything.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from .assets import PAGE, SCRIPT, STYLE
from .chart import Series, chart, smooth, style
from .record import Parity, Rows, Run

_IGNORED = {"run_dir", "save", "load"}
"""Options that differ between any two runs and say nothing about them."""


def build_page(runs: Sequence[Run], parity: Sequence[Parity] = (), title: str = "HAL report") -> str:
    """The HTML of a report on some runs, of which the first is what others are compared with."""
    sections = [
        ("Runs", _summary(runs)),
        ("Loss", _legend(runs) + _losses(runs)),
        *([("Difference from the first run", _legend(runs[1:], 1) + _differences(runs))] if len(runs) > 1 else []),
        ("Gradient norm", _legend(runs) + _plain(runs, "grad_norms", "gradient norm")),
        ("Throughput", _legend(runs) + _plain(runs, "throughput", "tokens per second", from_zero=True)),
        ("Configuration", _configuration(runs)),
        ("Memory", _memory(runs)),
        ("Fallbacks", _fallbacks(runs)),
        *([("Parity", "".join(map(_parity, parity)))] if parity else []),
        ("Versions and devices", _versions(runs)),
    ]
    body = "".join(f"<section><h2>{_text(name)}</h2>{content}</section>" for name, content in sections)
    return PAGE.format(title=_text(title), body=body, data=_data(runs), script=SCRIPT, style=STYLE)


def _summary(runs: Sequence[Run]) -> str:
    head = (
        "run",
        "backend",
        "iterations",
        "last loss",
        "last validation loss",
        "tokens/s",
        "model GFLOP/s",
        "fallbacks",
    )
    rows = []
    for number, run in enumerate(runs):
        last = [y for _, y in run.losses[-10:]]
        flops = run.model_flops_per_second
        rows.append(
            (
                _swatch(number) + _text(run.name),
                _text(run.backend),
                _text(run.losses[-1][0] if run.losses else 0),
                _value(sum(last) / len(last) if last else None, ".4f"),
                _value(run.evaluations[-1][1] if run.evaluations else None, ".4f"),
                _value(run.tokens_per_second, ",.0f"),
                _value(None if flops is None else flops / 1e9, ",.1f"),
                _text(sum(n for n in run.fallbacks.values() if isinstance(n, int))),
            )
        )
    note = "<p class=note>The last loss is the mean of the last ten iterations.</p>"
    return _table(head, rows) + note


def _losses(runs: Sequence[Run]) -> str:
    series = []
    for number, run in enumerate(runs):
        window = max(1, len(run.losses) // 60)
        if window > 1:
            series.append(Series(run.name, run.losses, number, faint=True))
        series.append(Series(run.name, smooth(run.losses, window), number))
        series.append(Series(f"{run.name}, validation", run.evaluations, number, markers=True))
    note = "<p class=note>Lines are running means over a sixtieth of the run, faint lines every iteration, dots the "
    return chart(series, y_label="loss (nats per token)") + note + "validation loss.</p>"


def _differences(runs: Sequence[Run]) -> str:
    """How far the losses of runs with the same iterations are apart: what changes with the backend or layout only."""
    first, series, rows = dict(runs[0].losses), [], []
    for number, run in enumerate(runs[1:], 1):
        apart: Rows = [(n, abs(y - first[n])) for n, y in run.losses if n in first]
        series.append(Series(run.name, apart, number))
        largest = max((d for _, d in apart), default=None)
        equal = sum(d == 0.0 for _, d in apart)
        rows.append((_swatch(number) + _text(run.name), _text(len(apart)), _text(equal), _value(largest, ".2e")))
    table = _table(("run", "iterations in common", "bit-equal", "largest difference of the loss"), rows)
    return chart(series, y_label="|difference of the loss|", log=True) + table


def _plain(runs: Sequence[Run], what: str, label: str, *, from_zero: bool = False) -> str:
    series = []
    for number, run in enumerate(runs):
        rows: Rows = getattr(run, what)
        window = max(1, len(rows) // 60)
        if window > 1:
            series.append(Series(run.name, rows, number, faint=True))
        series.append(Series(run.name, smooth(rows, window), number))
    return chart(series, y_label=label, from_zero=from_zero)


def _configuration(runs: Sequence[Run]) -> str:
    names = sorted({name for run in runs for name in run.config} - _IGNORED)
    absent = "\u2013"
    if len(runs) == 1:
        rows = [(_text(n), _text(_shown(runs[0].config[n]))) for n in names if runs[0].config[n] is not None]
        return f"<details><summary>{len(rows)} options</summary>{_table(('option', 'value'), rows)}</details>"
    rows = []
    for name in names:
        values = [_shown(run.config[name]) if name in run.config else absent for run in runs]
        if len(set(values)) > 1:
            rows.append((_text(name), *map(_text, values)))
    if not rows:
        return '<p class="none">All runs had the same options.</p>'
    same = len(names) - len(rows)
    note = f"<p class=note>{same} options are the same in all runs.</p>"
    return _table(("option", *(_swatch(n) + _text(r.name) for n, r in enumerate(runs))), rows) + note


def _memory(runs: Sequence[Run]) -> str:
    known = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes]
    if not known:
        return '<p class="none">nothing was recorded</p>'
    rows = []
    for number, run in enumerate(runs):
        size = run.peak_memory_bytes or 0.0
        bar = f'<div class="bar" style="width:{100 * size / max(known):.1f}%;background:{style(number)[0]}"></div>'
        cell = _value(size / 2**20 if size else None, ",.1f")
        rows.append((_swatch(number) + _text(run.name), cell, bar))
    return _table(("run", "peak, MiB", ""), rows, wide_last=True)


def _fallbacks(runs: Sequence[Run]) -> str:
    rows = [
        (_swatch(number) + _text(run.name), _text(op), _text(count))
        for number, run in enumerate(runs)
        for op, count in sorted(run.fallbacks.items())
    ]
    if not rows:
        return '<p class="none">No call ran the reference in place of a kernel.</p>'
    return _table(("run", "op", "calls that ran the reference"), rows)


def _parity(parity: Parity) -> str:
    rows = []
    for row in parity.rows:
        status, reasons = str(row["status"]), row.get("reasons") or []
        error = row.get("worst_error_in_tolerances")
        good = isinstance(error, (int, float)) and not isinstance(error, bool)
        simulated = " (simulated)" if row.get("simulated") else ""
        # Only known words become part of a class name.
        mark = status if status in ("pass", "waived", "declined", "fail") else ""
        rows.append(
            (
                _text(row["op"]),
                _text(row["dtype"]),
                _text(f"{row['backend']}{simulated}"),
                f'<span class="status {mark}">{_text(status)}</span>',
                _text(row.get("samples", "")),
                _value(float(error) if good else None, ".3f"),
                _text("; ".join(map(str, reasons)) if isinstance(reasons, list) else reasons),
            )
        )
    counts: dict[str, int] = {}
    for row in parity.rows:
        counts[str(row["status"])] = counts.get(str(row["status"]), 0) + 1
    told = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    head = ("op", "dtype", "backend", "status", "samples", "worst error / tolerance", "reasons")
    is_open = " open" if len(rows) <= 40 or "fail" in counts else ""
    summary = f"<summary>{_text(parity.source)}: {_text(told)}</summary>"
    return f"<details{is_open}>{summary}{_table(head, rows)}</details>"


def _versions(runs: Sequence[Run]) -> str:
    rows = []
    for kind in ("versions", "device"):
        tables = [getattr(run, kind) for run in runs]
        for name in sorted({n for t in tables for n in t}):
            rows.append((_text(name), *(_text(_shown(t.get(name))) for t in tables)))
    return _table(("", *(_swatch(n) + _text(r.name) for n, r in enumerate(runs))), rows)


def _legend(runs: Sequence[Run], first: int = 0) -> str:
    items = (
        f"<li>{_swatch(n)}{_text(r.name)} <small>{_text(r.backend)}</small></li>" for n, r in enumerate(runs, first)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _swatch(number: int) -> str:
    colour, dash = style(number)
    line = f'<line x1="0" x2="22" y1="5" y2="5" stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"/>'
    return f'<svg class="swatch" viewBox="0 0 22 10" aria-hidden="true">{line}</svg>'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], *, wide_last: bool = False) -> str:
    """head and rows are HTML already."""
    titles = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    wide = ' class="wide-last"' if wide_last else ""
    return f'<div class="scroll"><table{wide}><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _value(value: float | None, how: str) -> str:
    return "\u2013" if value is None else _text(format(value, how))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _data(runs: Sequence[Run]) -> str:
    """What the reading aid needs: the values at each iteration."""
    curves = [
        {"name": r.name, "Loss": dict(r.losses), "Gradient norm": dict(r.grad_norms), "Throughput": dict(r.throughput)}
        for r in runs
    ]
    # In a script, only "<" could end it.
    return json.dumps(curves).replace("<", "\\u003c")
