""".ci/parts.py: parts run in parallel, failures do not stop others and are counted, and the last line reports them."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("ci_parts", ROOT / ".ci" / "parts.py")
parts = sys.modules["ci_parts"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(parts)


@pytest.mark.parametrize(
    "line, counts",
    [
        ("3600 passed, 102 skipped, 324 deselected, 548 warnings in 388.50s (0:06:28)", (3600, 0, 102)),
        ("== 1 failed, 2 passed, 3 errors in 0.12s ==", (2, 4, 0)),
        ("102 deselected in 1.20s", (0, 0, 0)),
        ("acme: 6 pass, 1 declined, 3 fail", (0, 0, 0)),
        ("12 passed in the first round", (0, 0, 0)),
        ("........ [ 12%]", (0, 0, 0)),
    ],
)
def test_sums_of_pytest_are_read(line, counts):
    result = parts.Result("x")
    result.read(line)
    assert (result.counts["passed"], result.counts["failed"], result.counts["skipped"]) == counts


SCRIPTS = {
    "quick": "print('5 passed, 1 skipped in 0.10s'); print('7 passed in 0.20s')",
    "broken": "import sys; print('1 failed, 2 passed in 0.30s'); sys.exit(1)",
    "lint": "print('All checks passed!')",
    "dead": "import os; os.kill(os.getpid(), 9)",
}


@pytest.fixture
def results(capsys):
    """The results of the planted parts, and their output."""
    stages = (("lint", "quick"), ("broken",), ("dead",))
    rows = parts.run_stages(stages, lambda part: [sys.executable, "-c", SCRIPTS[part]])
    return rows, capsys.readouterr().out


def test_all_parts_run_and_are_counted(results):
    rows, output = results
    assert [r.cells()[:1] + r.cells()[2:] for r in rows] == [
        ["lint", "-", "-", "-"],
        ["quick", "12", "0", "1"],
        ["broken", "2", "1", "0"],
        ["dead", "0", "1", "0"],
    ]
    assert parts.total(rows) == "14 passed, 2 failed"
    assert "[lint] All checks passed!\n" in output and "\n1 failed, 2 passed in 0.30s\n" in output
    assert len(parts.table(rows).splitlines()) == 5


def test_the_page_says_what_ran_where_and_when(results):
    text = parts.page(results[0], "2030-01-02", "abc", parts.machine())
    assert "- commit: abc\n" in text and "- date: 2030-01-02\n" in text and "- result: 14 passed, 2 failed\n" in text
    assert re.search(r"\| broken \| \d+ \| 2 \| 1 \| 0 \|", text)
    assert re.search(r"- machine: .*\d+ cores, \d+ GiB\n", text)


def test_every_part_is_a_target_of_the_makefile():
    targets = re.findall(r"^([\w./$()-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {t.replace("$(SIM)", ".venv-sim") for t in targets}
    for stages in parts.STAGES.values():
        assert {part for stage in stages for part in stage} <= named


@pytest.mark.parametrize("code", [0, 1])
def test_the_last_line_is_the_total_and_the_exit_code_tells_failure(monkeypatch, capsys, tmp_path, code):
    monkeypatch.setattr(parts, "STAGES", {"ci": (("quick",),), "nightly": (("quick",),)})
    monkeypatch.setattr(parts, "PAGE", tmp_path / "nightly.md")
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "run_part", lambda part, command, say: parts.Result(part, code))
    assert parts.main("ci") == code
    assert capsys.readouterr().out.splitlines()[-1] == f"0 passed, {code} failed"
    assert not parts.PAGE.exists()
    assert parts.main("nightly") == code
    assert f"0 passed, {code} failed" in parts.PAGE.read_text()
