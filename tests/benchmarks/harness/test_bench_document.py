"""Tables of a page generated from a run's rows, and this project's page."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hal.bench.harness import document, runner
from hal.bench.harness.engine import Row

PAGE = Path(__file__).parents[3] / "docs" / "performance.md"
HEAD = "words before\n\n<!-- cases ops thing .* -->\n\n"


def row(ratio, **kw):
    base = {"suite": "ops", "name": "thing", "shape": "4x4", "peer": "eager", "allocator": "default"}
    return Row(**{**base, "ratio_median": ratio, "ratio_min": ratio, "ratio_max": ratio, "ours": 1e-3, **kw})


def test_a_line_per_case_and_a_column_per_peer():
    rows = [row(2.0, goal=1.5), row(1.0, peer="compile", goal=1.5), row(3.0, allocator="pooled")]
    assert document.fill(HEAD + "\nwords after\n", rows) == (
        HEAD + "| what | shape | malloc | eager | compile | share |\n| --- | --- | --- | --- | --- | --- |\n"
        "| thing | 4x4 | default | 2.00x ≥ 1.5 (2.0..2.0) | **1.00x < 1.5** (1.0..1.0) |  |\n"
        "| thing | 4x4 | pooled | 3.00x (3.0..3.0) |  |  |\n\nwords after\n"
    )


def test_the_old_table_goes_and_shares_are_held_to_their_goals():
    page = "<!-- rows ops .* -->\n\n| old |\n| --- |\n| 9.99x |\n\nwords\n"
    rows = [
        row(2.0, ceiling="copy", share_of_ceiling=s, share_goal=g, clean=4, rounds=5)
        for s, g in ((0.7, 0.8), (0.9, None))
    ]
    assert document.fill(page, rows) == (
        "<!-- rows ops .* -->\n\n| what | shape | malloc | peer | ratio | share | clean rounds |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| thing | 4x4 | default | eager | 2.00x (2.0..2.0) | **70% < 80%** of copy | 4/5 |\n"
        "| thing | 4x4 | default | eager | 2.00x (2.0..2.0) | 90% of copy | 4/5 |\n\nwords\n"
    )


def test_every_row_needs_a_table_and_every_table_a_row():
    with pytest.raises(ValueError, match="1 rows are in no table; the first: ops other 4x4"):
        document.fill(HEAD, [row(1.0), row(1.0, name="other")])
    with pytest.raises(ValueError, match="no row of suite ops is left for the table of 'thing"):
        document.fill(HEAD, [row(1.0, suite="linear")])
    with pytest.raises(ValueError, match="two rows for thing 4x4 against eager, default malloc"):
        document.fill(HEAD, [row(1.0), row(2.0)])
    with pytest.raises(ValueError, match="must be a separate line before an empty line"):
        document.fill(HEAD.replace("-->\n", "-->"), [row(1.0)])
    document.fill(HEAD, [row(1.0), row(1.0, suite="scaling")])  # the page shows no table of that suite


@pytest.mark.parametrize(
    ("ratio", "share", "text"),
    [(1.996, 0.5, "**1.996x < 2**"), (1.5, 0.797, "**79.7% < 80%**"), (1.9, 0.79, "**79% < 80%**")],
)
def test_a_miss_is_not_rounded_to_its_goal(ratio, share, text):
    assert text in document.fill(HEAD, [row(ratio, goal=2.0, ceiling="copy", share_of_ceiling=share, share_goal=0.8)])


def test_a_figure_below_its_goal_is_no_miss_if_the_other_reaches_its_own():
    by_share = row(1.5, goal=2.0, ceiling="copy", share_of_ceiling=0.9, share_goal=0.8)
    assert "| 1.50x < 2 (1.5..1.5) | 90% ≥ 80% of copy |" in document.fill(HEAD, [by_share])


def test_a_plot_of_nothing_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([row(2.0).as_dict()]))
    page = tmp_path / "page.md"
    page.write_text(HEAD + "\n![length](plot.svg)\n")
    with pytest.raises(ValueError, match="no rows for the plots of length"):
        document.main(str(tmp_path / "rows.json"), str(page))
    assert "|" not in page.read_text()


def test_plots_are_files_of_their_own(tmp_path):
    series = [row(2.0, shape=f"S{s}", series="length", x=float(s)) for s in (512, 1024, 2048)]
    (tmp_path / "rows.json").write_text(json.dumps([r.as_dict() for r in series]))
    page = tmp_path / "page.md"
    page.write_text(HEAD + "\n![length](plot.svg)\n")
    document.main(str(tmp_path / "rows.json"), str(page))
    assert ElementTree.parse(tmp_path / "plot.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert page.read_text().count("\n| thing |") == 3


def test_the_project_s_own_page_has_a_table_behind_every_comment():
    text = PAGE.read_text()
    tables = document._TABLE.findall(text)
    assert len(tables) == text.count("<!--") > 5
    assert {suite for _, _, suite, _ in tables} == set(runner.SUITES) - {"scaling"}  # docs/scaling.md
    for start, *_ in tables:
        assert re.match(r"\|.*\|\n\| --- ", text[text.index(start) + len(start) :])
