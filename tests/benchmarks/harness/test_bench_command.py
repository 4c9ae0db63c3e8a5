"""`hal bench` and its goals: exit codes, files, and a check that every goal matches a comparison."""

import importlib
import json
import re
from xml.etree import ElementTree

import pytest

from hal.bench.harness import goals, report, runner
from hal.bench.harness.engine import Absent, Row
from hal.cli import main


def row(ratio, goal=None, **kw):
    base = {"suite": "ops", "name": "thing", "shape": "4x4", "peer": "eager", "allocator": "default"}
    return Row(**{**base, **kw}, ratio_median=ratio, ratio_min=ratio, ratio_max=ratio, ours=1e-3, goal=goal)


def absent(goal):
    return Absent("ops", "thing", "4x4", "flex", "default", "NotImplementedError: no", goal)


@pytest.fixture
def bench(monkeypatch):
    """Runs `hal bench` on given results instead of measuring."""

    def run(results, *argv):
        monkeypatch.setattr(runner, "run", lambda *a, **k: results)
        return main(["bench", "ops", *argv])

    return run


@pytest.mark.parametrize(
    ("results", "status"),
    [
        (runner.Results([row(2.0, 1.5)]), 0),
        (runner.Results([row(1.0, 1.5)]), 1),
        (runner.Results([row(2.0, 1.5)], [absent(None)]), 0),
        (runner.Results([row(2.0, 1.5)], [absent(1.0)]), 1),  # a goal that could not be measured is not met
        (runner.Results([row(2.0)]), 2),  # a run without anything to check does not pass
        (runner.Results(), 2),
        (runner.Results([row(2.0, 1.5)], interrupted=True), 1),
        (runner.Results([], interrupted=True), 1),
    ],
)
def test_check_exit_codes(bench, results, status):
    assert bench(results, "--check") == status


def test_without_check_a_miss_is_reported_but_is_no_failure(bench, capsys):
    assert bench(runner.Results([row(1.0, 1.5)])) == 0
    out = capsys.readouterr()
    assert "MISSED 1.5x" in out.out
    assert "below its goal: thing 4x4, default malloc: 1.00x eager, goal 1.5x" in out.err


def test_json_is_a_list_of_rows(bench, tmp_path):
    assert bench(runner.Results([row(2.0), row(3.0, peer="compile")]), "--json", str(tmp_path / "f")) == 0
    read = json.loads((tmp_path / "f").read_text())
    assert [(r["peer"], r["ratio_median"]) for r in read] == [("eager", 2.0), ("compile", 3.0)]


def test_an_unknown_backend_is_wrong_usage(capsys):
    assert main(["bench", "ops", "--backend", "cpu_reff"]) == 2
    assert "cpu_ref" in capsys.readouterr().err


def test_html_is_self_contained_and_well_formed(bench, tmp_path):
    series = [row(2.0, series="a & b: S", x=float(s), suite="attention") for s in (512, 1024, 2048)]
    results = runner.Results([*series, row(1.0, 1.5, shape="<4>")], [absent(None)])
    bench(results, "--html", str(tmp_path / "f"))
    page = (tmp_path / "f").read_text()
    assert "<4>" not in page and "&lt;4&gt;" in page
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    labels = ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b: S", "512", "1024", "2048", "1 ms"} <= set(labels)
    assert {"HAL ~ x^0.00", "eager ~ x^0.00"} <= set(labels)
    assert re.findall(r'(?:src|href)="(?!#)|url\((?!#)|@import|<script|<link', page) == []


def comparisons():
    """Every (name, shape, peer, allocator) that the suites can produce."""
    for module in runner.SUITES.values():
        for case in importlib.import_module(module).cases():
            for allocator in case.allocators:
                for peer in [*case.under(allocator), *case.budgets]:
                    yield case.name, case.shape, peer, allocator
            if case.series:
                yield "growth", case.series, "linear growth", "default"


@pytest.mark.parametrize("goal", goals.RATIOS, ids=lambda g: f"{g.name}|{g.shape}|{g.peer}")
def test_every_goal_is_about_something_that_is_measured(goal, monkeypatch):
    """A goal whose pattern matches no comparison, or only those of an earlier goal, would never be checked."""
    always = [goals.Goal(g.name, g.shape, g.peer, g.least, g.allocator) for g in goals.RATIOS if g.holds is not None]
    at = goals.RATIOS.index(goal)
    # Another goal for the same cases applies elsewhere.
    elsewhere = {i for i, g in enumerate(goals.RATIOS) if g.holds in (goals._slow_mkl, goals._fast_mkl, goals._amx)}
    reachable = [g for i, g in enumerate(always) if i not in elsewhere or i == at]
    position = reachable.index(always[at])
    assert any(
        goals._find(reachable[: position + 1], *c) is not None and goals._find(reachable[:position], *c) is None
        for c in comparisons()
    )


def test_names_of_cases_are_unique():
    names = [c for c in comparisons() if c[0] != "growth"]
    assert len(names) == len(set(names))


def test_goals_are_for_cpu_ref_only():
    assert runner.ratio_goal("cpu_ref", "dispatch", "x", "torch.library", "default") == 4.0
    assert runner.ratio_goal("cuda", "dispatch", "x", "torch.library", "default") is None


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.5, "s", "1.5 s"), (2e-3, "s", "2 ms"), (3e-6, "s", "3 us"), (4e-9, "s", "4 ns"), (2**21, "B", "2 MiB")],
)
def test_quantities(value, unit, text):
    assert report.quantity(value, unit) == text
