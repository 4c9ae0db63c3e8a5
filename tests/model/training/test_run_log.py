"""The log lines, the run.json and the plot that RunLog writes."""

import io
import json
import re
import sys
import time

import pytest

from hal import HalError
from hal.model.training import run_log
from hal.model.training.log_line import compact_line
from hal.model.training.run_log import RunLog
from hal.model.training.step_result import StepResult


def step(iteration):
    return StepResult(iteration, iteration * 4, 1.0 / iteration, 2.0, 1e-3, 1.0, False, 0.25, 4)


def test_the_first_loss_is_printed_at_once_and_the_interval_goes_on(tiny, cpu_ref, tmp_path, capsys):
    with RunLog(tiny(train_iters=9, log_interval=4), tmp_path / "log", 0) as log:
        for iteration in (1, 2, 3, 4):
            log.step(step(iteration))
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r"iteration +(\d+)/.* lm loss: (\S+) ", line) for line in lines] == [
        [("1", "1.000000E+00")],
        [("4", f"{(1 + 1 / 2 + 1 / 3 + 1 / 4) / 4:.6E}")],
    ]


@pytest.mark.parametrize(
    ("terminal", "format", "compact"),
    [(True, "auto", True), (False, "auto", False), (True, "megatron", False), (False, "compact", True)],
)
def test_a_terminal_gets_compact_lines_unless_megatrons_are_asked_for(
    tiny, cpu_ref, tmp_path, monkeypatch, terminal, format, compact
):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "80")
    with RunLog(tiny(train_iters=9, log_interval=1, log_format=format), tmp_path / "log", 0) as log:
        log.step(step(1))
    lines = [line.rstrip() for line in stream.getvalue().splitlines() if "lr" in line or "lm loss" in line]
    assert ("lm loss" in lines[0]) is not compact
    if compact:
        assert re.search(r"1/9  loss 1\.0000  norm 2\.00  lr 1\.0e-03  \d+ tok/s  \d+ GFLOP/s$", lines[0])


def test_a_compact_line_says_what_is_unusual_and_fits_a_terminal(tiny):
    config = tiny(train_iters=500000, fp16=True)
    skipped = StepResult(123456, 4, 1.0, None, 1e-3, 65536.0, True, 0.25, 4)
    line = compact_line([skipped], config, 1e9)
    assert "no loss" in line and "skipped 1" in line and "scale 65536" in line and "norm" not in line
    usual = compact_line([step(123456)], config, 1e9)
    assert "scale" not in usual and "skipped" not in usual and len(usual) <= 80


@pytest.fixture
def log(tiny, cpu_ref, tmp_path):
    with RunLog(tiny(train_iters=9, log_interval=2), tmp_path / "log", 0) as log:
        yield log


def losses(log):
    return json.loads((log.folder / "run.json").read_text())["losses"]


def test_the_record_is_written_while_training_goes_on(log, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log.step(step(1))
    assert not (log.folder / "run.json").exists()
    log.step(step(2))
    assert losses(log) == [[1, 1.0], [2, 0.5]]
    for iteration in (3, 4):
        log.step(step(iteration))
    assert len(losses(log)) == 2  # too early for another one
    now[0] += run_log.RECORD_SECONDS
    for iteration in (5, 6):
        log.step(step(iteration))
    assert len(losses(log)) == 6


@pytest.mark.parametrize(
    "name, row",
    [
        ("losses", '[1, "x"]'),
        ("losses", "[1, 1, 1]"),
        ("grad_norms", "[1.5, 1.0]"),
        ("evaluations", "[1, 1" + "0" * 400 + "]"),
        ("step_seconds", "[1, NaN]"),
        ("expert_loads", '[1, {"0": [Infinity]}]'),
    ],
)
def test_a_record_that_could_not_be_written_again_is_refused(tiny, cpu_ref, tmp_path, name, row):
    """When a run resumes, and not at its next record."""
    rows = {key: f"[{row}]" if key == name else "[]" for key in ("losses", "grad_norms", "evaluations", name)}
    (tmp_path / "run.json").write_text("{" + ", ".join(f'"{key}": {value}' for key, value in rows.items()) + "}")
    with pytest.raises(HalError, match="is not a run's record"):
        RunLog(tiny(train_iters=9), tmp_path, 5)


def test_a_record_that_takes_long_is_written_rarely(log, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(log, "_write_record", lambda: now.__setitem__(0, now[0] + 3.0))
    log.record()
    assert log._next_record == 100.0 + 300.0


def test_a_full_disk_does_not_end_a_run(log, monkeypatch):
    attempts = []

    def full():
        attempts.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "_write_record", full)
    for iteration in (1, 2):
        log.step(step(iteration))
    assert attempts
    monkeypatch.undo()


def test_a_plot_that_cannot_be_drawn_does_not_change_the_result(log, monkeypatch):
    lines = []
    monkeypatch.setattr(log, "write_line", lines.append)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    log.step(step(1))
    log.finish("", "")
    assert losses(log) == [[1, 1.0]] and (log.folder / "sample.txt").exists()
    assert "loss.png could not be written: " in lines[-1]
