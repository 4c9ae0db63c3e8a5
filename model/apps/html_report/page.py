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
    first = dict(runs[0].losses)
    differences = {
        number: [(n, abs(loss - first[n])) for n, loss in run.losses if n in first]
        for number, run in enumerate(runs[1:], 1)
    }
    names = sorted({name for run in runs for name, value in run.config.items() if value is not None} - _PATHS)
    options = {name: [_shown(run.config[name]) if name in run.config else "–" for run in runs] for name in names}
    return pages.render(
        Path(__file__).with_name("report.html.j2"),
        title=title,
        runs=runs,
        parity=parity,
        plots=_plots(runs, differences),
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


def _plots(runs: Sequence[Run], differences: dict[int, Rows]) -> list[Plot]:
    def plot(title: str, rows: Sequence[Rows], label: str, form: str, *, first: int = 0, **how: Any) -> Plot:
        drawn = chart.curves(rows, label, first=first, **how)
        return Plot(title, drawn, range(first, len(runs)), _listed(rows), form)

    losses, evaluations = [run.losses for run in runs], [run.evaluations for run in runs]
    plots = [plot("Loss", losses, "loss (nats per token)", ".4f", dots=evaluations)]
    if differences:
        gaps = list(differences.values())
        label = "|difference of the loss|"
        plots.append(plot("Difference from the first run", gaps, label, ".2e", first=1, smooth=False, log=True))
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
