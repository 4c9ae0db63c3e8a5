"""`hal bench` and its goals: exit codes, files, and that no goal is stale."""

import importlib
import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hal.bench import goals, report, runner
from hal.bench.engine import Absent, Row
from hal.cli import main


def row(ratio, goal=None, **kw):
    base = {"suite": "ops", "name": "thing", "shape": "4x4", "peer": "eager", "allocator": "default"}
    return Row(**{**base, **kw}, ratio_median=ratio, ratio_min=ratio, ratio_max=ratio, ours=1e-3, goal=goal)


def absent(goal):
    return Absent("ops", "thing", "4x4", "flex", "default", "NotImplementedError: no", goal)


@pytest.fixture
def bench(monkeypatch):
    """Runs `hal bench` on given results instead of measuring."""

    def run(found, *argv):
        monkeypatch.setattr(runner, "run", lambda *a, **k: found)
        return main(["bench", "ops", *argv])

    return run


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (runner.Found([row(2.0, 1.5)]), 0),
        (runner.Found([row(1.0, 1.5)]), 1),
        (runner.Found([row(2.0, 1.5)], [absent(None)]), 0),
        (runner.Found([row(2.0, 1.5)], [absent(1.0)]), 1),  # what could not be measured is not met
        (runner.Found([row(2.0)]), 2),  # nothing to check is not a pass
        (runner.Found(), 2),
        (runner.Found([row(2.0, 1.5)], interrupted=True), 1),
    ],
)
def test_check_exit_codes(bench, found, status):
    assert bench(found, "--check") == status


def test_without_check_a_miss_is_reported_but_no_failure(bench, capsys):
    assert bench(runner.Found([row(1.0, 1.5)])) == 0
    out = capsys.readouterr()
    assert "MISSED 1.5x" in out.out
    assert "below its goal: thing 4x4, default malloc: 1.00x eager, goal 1.5x" in out.err


def test_json_is_a_list_of_rows(bench, tmp_path):
    assert bench(runner.Found([row(2.0), row(3.0, peer="compile")]), "--json", str(tmp_path / "f")) == 0
    read = json.loads((tmp_path / "f").read_text())
    assert [(r["peer"], r["ratio_median"]) for r in read] == [("eager", 2.0), ("compile", 3.0)]


def test_an_unknown_backend_is_wrong_usage(capsys):
    assert main(["bench", "ops", "--backend", "cpu_reff"]) == 2
    assert "cpu_ref" in capsys.readouterr().err


def test_html_needs_nothing_else_and_is_well_formed(bench, tmp_path):
    series = [row(2.0, series="a & b: S", x=float(s), suite="attention") for s in (512, 1024, 2048)]
    found = runner.Found([*series, row(1.0, 1.5, shape="<4>")], [absent(None)])
    bench(found, "--html", str(tmp_path / "f"))
    page = (tmp_path / "f").read_text()
    assert "<4>" not in page
    assert "http" not in page
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    drawn = ElementTree.fromstring(svg)
    assert len(drawn.findall("polyline")) == 2  # HAL and eager
    assert any("x^0.00" in (t.text or "") for t in drawn.findall("text"))

    class Tags(HTMLParser):
        loads: list = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            self.loads += [v for k, v in attrs if k in ("src", "href")]

    Tags().feed(page)
    assert Tags.loads == []


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
    """A goal whose pattern fits no case (or only what an earlier goal takes) would pass unseen."""
    always = [goals.Goal(g.name, g.shape, g.peer, g.least, g.allocator) for g in goals.RATIOS if g.holds is not None]
    at = goals.RATIOS.index(goal)
    elsewhere = {i for i, g in enumerate(goals.RATIOS) if g.holds is goals._slow_mkl}  # one of the two linear goals
    reachable = [g for i, g in enumerate(always) if i not in elsewhere or i == at]
    mine = reachable.index(always[at])
    assert any(
        goals._find(reachable[: mine + 1], *c) is not None and goals._find(reachable[:mine], *c) is None
        for c in comparisons()
    )


def test_names_of_cases_are_unique():
    seen = list(comparisons())
    timed = [c for c in seen if c[0] != "growth"]
    assert len(timed) == len(set(timed))


def test_goals_are_for_cpu_ref_only():
    assert runner._goal("cpu_ref", "dispatch", "x", "budget of 1 us", "default") == 1.0
    assert runner._goal("cuda", "dispatch", "x", "budget of 1 us", "default") is None


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.5, "s", "1.5 s"), (2e-3, "s", "2 ms"), (3e-6, "s", "3 us"), (4e-9, "s", "4 ns"), (2**21, "B", "2 MiB")],
)
def test_quantities(value, unit, text):
    assert report.quantity(value, unit) == text
