""".ci/parts.py: parts run in parallel, failures do not stop others and are counted, and the last line reports them."""

import importlib.util
import re
import sys
from collections import Counter
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


def test_the_page_says_what_ran_where_and_when_and_keeps_other_parts():
    production, mutation = parts.Result("production"), parts.Result("mutation", counts=Counter(passed=1))
    for line in ("pass     adamw     float32", "cpu_ref: 100 pass", "npu (simulated): 117 pass, 5 waived"):
        production.read(f"{line}\n")
    mutation.read("91.7% of 60 mutants killed; 90% are required\n")
    first = parts.page([production], "2030-01-02", "abc", parts.machine())
    quoted = r"cpu_ref: 100 pass; npu \(simulated\): 117 pass, 5 waived"
    row = rf"\| production \| 0 \| - \| - \| - \| {quoted} \| abc \| 2030-01-02 \| .*\d+ cores, \d+ GiB \|\n"
    assert re.search(row, first)
    both = parts.page([mutation], "2030-01-03", "def", "m", first)
    killed = "91.7% of 60 mutants killed; 90% are required"
    assert re.search(row, both) and f"| mutation | 0 | 1 | 0 | 0 | {killed} | def | 2030-01-03 | m |\n" in both
    assert parts.page([production], "2030-01-04", "abc", "m", both).count("| production |") == 1


def test_every_part_is_a_target_of_the_makefile():
    targets = re.findall(r"^([\w./$()-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {t.replace("$(SIM)", ".venv-sim") for t in targets}
    for stages in parts.STAGES.values():
        assert {part for stage in stages for part in stage} <= named


@pytest.mark.parametrize("code", [0, 1])
def test_the_last_line_is_the_total_and_the_exit_code_tells_failure(monkeypatch, capsys, tmp_path, code):
    monkeypatch.setattr(parts, "STAGES", {"ci": (("quick",),), "nightly": (("quick",), ("slow",))})
    monkeypatch.setattr(parts, "PAGE", tmp_path / "nightly.md")
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "run_part", lambda part, command, say: parts.Result(part, code))
    assert parts.main("ci") == code
    assert capsys.readouterr().out.splitlines()[-1] == f"0 passed, {code} failed"
    assert not parts.PAGE.exists()
    assert parts.main("nightly", "quick") == code
    assert "| quick |" in parts.PAGE.read_text() and "| slow |" not in parts.PAGE.read_text()
    assert parts.main("nightly") == code
    assert "| slow |" in parts.PAGE.read_text()
    with pytest.raises(SystemExit, match="no part other"):
        parts.main("nightly", "other")


def test_a_nightly_run_that_is_stopped_keeps_the_rows_of_its_finished_parts(monkeypatch, tmp_path):
    def run(part, command, say):
        if part == "slow":
            raise KeyboardInterrupt
        return parts.Result(part)

    monkeypatch.setattr(parts, "STAGES", {"nightly": (("quick",), ("slow",))})
    monkeypatch.setattr(parts, "PAGE", tmp_path / "nightly.md")
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "run_part", run)
    with pytest.raises(KeyboardInterrupt):
        parts.main("nightly")
    assert "| quick |" in parts.PAGE.read_text() and "| slow |" not in parts.PAGE.read_text()
