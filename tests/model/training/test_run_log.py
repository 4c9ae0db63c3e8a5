"""run.json while a run goes on."""

import json
import time

import pytest

from hal.model.training import run_log
from hal.model.training.run_log import RunLog
from hal.model.training.trainer import StepResult


def step(iteration):
    return StepResult(iteration, iteration * 4, 1.0 / iteration, 2.0, 1e-3, 1.0, False, 0.25, 4)


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
