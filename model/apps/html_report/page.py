"""Builds the report page: curves of all runs in shared charts, differences, options, memory, fallbacks, and parity.

This module computes the content; report.html.j2 defines the presentation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from hal import pages

from . import chart
from .profile_section import profile_section
from .record import Parity, Rows, Run

_PATHS = {"run_dir", "save", "load"}
"""Paths of a run, which are not compared because they differ between runs."""
_LISTED = 20
"""The number of iterations in the table below a chart."""


@dataclass(frozen=True)
class Plot:
    """A section with a chart. runs: numbers of the runs that it shows. values: iterations with the value of each run.
    form: the format of a value."""

    title: str
    chart: Markup | None
    runs: Sequence[int]
    values: Sequence[tuple[int, list[float | None]]]
    form: str


def build_page(runs: Sequence[Run], parity: Sequence[Parity] = (), title: str = "HAL report") -> str:
    """The HTML of a report on some runs; the others are compared with the first."""
    first, units = dict(runs[0].losses), _units(runs)
    differences = {
        number: [(n, abs(loss - first[n])) for n, loss in run.losses if n in first]
        for number, run in enumerate(runs[1:], 1)
        if not units.tokenizers or run.tokenizer == runs[0].tokenizer
    }
    names = sorted({name for run in runs for name, value in run.config.items() if value is not None} - _PATHS)
    options = {name: [_shown(run.config[name]) if name in run.config else "–" for run in runs] for name in names}
    return pages.render(
        Path(__file__).with_name("report.html.j2"),
        title=title,
        runs=runs,
        parity=parity,
        units=units,
        plots=_plots(runs, differences, units),
        profiles=[s for s in map(profile_section, range(len(runs)), runs) if s is not None],
        differences={number: [gap for _, gap in rows] for number, rows in differences.items()},
        options=options,
        differing={name: values for name, values in options.items() if len(set(values)) > 1},
        largest_memory=max(run.peak_memory_bytes or 0.0 for run in runs),
        facts=[
            (name, [_shown(table.get(name)) for table in tables])
            for tables in ([run.versions for run in runs], [run.device for run in runs])
            for name in sorted(set().union(*tables))
        ],
        style=chart.style,
    )


@dataclass(frozen=True)
class Units:
    """In what the losses are compared. tokenizers: what distinguishes the runs' tokenizers, empty if they are the same
    or not known. per_byte: whether losses are shown in bits per byte; unknown: names of the runs for which they cannot
    be, because their records do not tell how many bytes a token has."""

    tokenizers: Sequence[str]
    per_byte: bool
    unknown: Sequence[str]


def _units(runs: Sequence[Run]) -> Units:
    tokenizers = [run.tokenizer for run in runs]
    if len({t for t in tokenizers if t}) < 2:
        return Units((), False, ())
    unknown = [run.name for run in runs if run.bits_per_byte is None]
    return Units(tokenizers, not unknown, unknown)


def _plots(runs: Sequence[Run], differences: dict[int, Rows], units: Units) -> list[Plot]:
    def plot(title: str, rows: Sequence[Rows], label: str, form: str, *, first: int = 0, **how: Any) -> Plot:
        drawn = chart.curves(rows, label, first=first, **how)
        return Plot(title, drawn, range(first, len(runs)), _listed(rows), form)

    losses, evaluations, label = [run.losses for run in runs], [run.evaluations for run in runs], "nats per token"
    if units.per_byte:
        comparable = [run.bits_per_byte for run in runs]
        losses, evaluations, label = [c[0] for c in comparable if c], [c[1] for c in comparable if c], "bits per byte"
    plots = [plot("Loss", losses, f"loss ({label})", ".4f", dots=evaluations)]
    if differences:
        label = "|difference of the loss|"
        by_run = [differences.get(number, []) for number in range(1, len(runs))]
        plots.append(plot("Difference from the first run", by_run, label, ".2e", first=1, smooth=False, log=True))
    plots.append(plot("Gradient norm", [run.grad_norms for run in runs], "gradient norm", ".4g"))
    # Of the layer with the largest imbalance, and of that with the smallest entropy.
    for title, rows, label in (
        ("Largest load of an expert", [run.expert_imbalance for run in runs], "multiples of an even share"),
        ("Entropy of the router", [run.router_entropy for run in runs], "share of that of equal scores"),
    ):
        if any(rows):
            plots.append(plot(title, rows, label, ".3f", from_zero=True))
    speeds = [run.throughput for run in runs]
    return [*plots, plot("Throughput", speeds, "tokens per second", ",.0f", from_zero=True)]


def _listed(runs: Sequence[Rows]) -> list[tuple[int, list[float | None]]]:
    """Rows of a table: the first, the last and evenly spaced iterations, with the value of each run."""
    iterations = sorted({n for rows in runs for n, _ in rows})
    if len(iterations) > _LISTED:
        iterations = [iterations[i] for i in np.linspace(0, len(iterations) - 1, _LISTED).round().astype(int)]
    tables = [dict(rows) for rows in runs]
    return [(n, [table.get(n) for table in tables]) for n in iterations]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
