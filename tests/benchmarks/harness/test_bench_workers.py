"""The worker processes: each has its own allocator environment, and neither a refusal nor a crash counts as a time.

The planted candidates advance the clock of their process themselves, so that every time is known.
"""

import os
import signal
import sys

import pytest

from hal.bench.harness import machine, runner
from hal.bench.harness.engine import Effort
from hal.errors import HalError

SUITE = """
import os, pathlib, signal, time
import torch
from hal.bench.harness.case import Candidate, Case

now = 0.0

def takes(seconds, mmap_max):
    time.perf_counter = lambda: now
    if os.environ.get("MALLOC_MMAP_MAX_") != mmap_max:
        raise RuntimeError(f"MALLOC_MMAP_MAX_ is {os.environ.get('MALLOC_MMAP_MAX_')}")
    def call():
        global now
        now += seconds
    return call

def refuse():
    raise NotImplementedError("not on this machine")

def memory():
    return lambda: torch.ones(64 << 20, dtype=torch.uint8)

def die():
    return lambda: os._exit(7)

def interrupt():
    def call():
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
        pathlib.Path(__file__).with_name("survived").touch()
    return call

def cases():
    pooled = {"ours": Candidate(lambda: takes(0.25, "0"), "a"), "refuses": Candidate(refuse)}
    plain = {"ours": Candidate(lambda: takes(0.5, None)), "peer": Candidate(lambda: takes(1.5, None))}
    return [
        Case("pooled", "x", pooled, allocators=("pooled",), budgets={"a second": 1.0}),
        Case("plain", "x", plain),
        Case("bytes", "x", {"ours": Candidate(memory, "b")}, budgets={"128 MiB": 128 << 20}, quantity="bytes"),
        Case("interrupts", "x", {"ours": Candidate(interrupt, "d")}, budgets={"a second": 1.0}),
        Case("dies", "x", {"ours": Candidate(die, "c")}, budgets={"a second": 1.0}),
    ]
"""


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Registers SUITE as a suite called "planted", here and in worker processes; returns its folder."""
    folder = tmp_path / "suites"
    folder.mkdir()
    (folder / "planted_suite.py").write_text(SUITE)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "planted_suite", raising=False)
    monkeypatch.setitem(runner.SUITES, "planted", "planted_suite")
    return folder


def test_the_environment_is_exactly_what_a_row_names(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("HAL_BACKEND", "npu")
    assert not any(k.startswith(("MALLOC_", "HAL_BACKEND")) for k in machine.environment("default"))
    assert machine.environment("pooled")["MALLOC_MMAP_MAX_"] == "0"
    assert machine.environment("pooled")["PATH"] == machine.environment("default")["PATH"]


@pytest.mark.nightly
def test_candidates_run_in_their_environment_and_refusals_are_reported(planted):
    """The planted candidates refuse to be created except under the allocator of their case."""
    effort = Effort(rounds=3, least=3, seconds=0.01)
    results = runner.run(["planted"], "cpu_ref", only=["pooled", "plain"], effort=effort)
    assert [(r.name, r.peer, r.allocator, r.ours, r.ratio_median) for r in results.rows] == [
        ("pooled", "a second", "pooled", 0.25, 4.0),
        ("plain", "peer", "default", 0.5, 3.0),
    ]
    (absent,) = results.absent
    assert (absent.peer, absent.reason) == ("refuses", "NotImplementedError: not on this machine")


@pytest.mark.slow
def test_memory_is_what_a_call_adds_at_its_peak(planted):
    results = runner.run(["planted"], "cpu_ref", only=["bytes"])
    assert [r.ratio_median for r in results.rows] == [pytest.approx(2.0, rel=0.1)]
    assert results.rows[0].unit == "B"


def test_a_worker_that_dies_is_an_error(planted):
    with pytest.raises(HalError, match="died"):
        runner.run(["planted"], "cpu_ref", only=["dies"])


@pytest.mark.slow
def test_an_interrupt_ends_the_call_in_progress_and_keeps_what_was_measured(planted):
    # A job started in the background of a script inherits an ignored SIGINT, and Python then raises nothing.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        results = runner.run(["planted"], "cpu_ref", only=["bytes", "interrupts", "dies"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert results.interrupted
    assert [r.name for r in results.rows] == ["bytes"]
    assert not (planted / "survived").exists()
