"""The child processes: each has its own allocator environment, and neither a refusal nor a crash passes for a time."""

import signal
import time

import pytest

from hal.bench import machine, runner
from hal.bench.engine import Effort
from hal.errors import HalError

SUITE = """
import os, signal, time
import torch
from hal.bench.case import Candidate, Case

def environment(expected):
    if os.environ.get("MALLOC_MMAP_MAX_") != expected:
        raise RuntimeError(f"MALLOC_MMAP_MAX_ is {os.environ.get('MALLOC_MMAP_MAX_')}")
    return lambda: time.sleep(0.01)

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
    return call

def cases():
    pooled = {"ours": Candidate(lambda: environment("0"), "a"), "refuses": Candidate(refuse)}
    plain = {"ours": Candidate(lambda: environment(None)), "peer": Candidate(lambda: environment(None))}
    return [
        Case("pooled", "x", pooled, allocators=("pooled",), budgets={"a minute": 60.0}),
        Case("plain", "x", plain),
        Case("bytes", "x", {"ours": Candidate(memory, "b")}, budgets={"128 MiB": 128 << 20}, quantity="bytes"),
        Case("interrupts", "x", {"ours": Candidate(interrupt, "d")}, budgets={"a minute": 60.0}),
        Case("dies", "x", {"ours": Candidate(die, "c")}, budgets={"a minute": 60.0}),
    ]
"""


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Makes SUITE a suite called "planted", here and in child processes."""
    (tmp_path / "planted_suite.py").write_text(SUITE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(runner.SUITES, "planted", "planted_suite")


def test_the_environment_is_exactly_what_a_row_names(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("HAL_BACKEND", "npu")
    assert not any(k.startswith(("MALLOC_", "HAL_BACKEND")) for k in machine.environment("default"))
    assert machine.environment("pooled")["MALLOC_MMAP_MAX_"] == "0"
    assert machine.environment("pooled")["PATH"] == machine.environment("default")["PATH"]


def test_candidates_run_in_their_environment_and_refusals_are_told(planted):
    """The planted candidates refuse to be made anywhere but under the allocator of their case."""
    effort = Effort(rounds=3, least=3, seconds=0.01)
    found = runner.run(["planted"], "cpu_ref", only=["pooled", "plain"], effort=effort)
    assert [(r.name, r.peer, r.allocator) for r in found.rows if r.unit == "s"] == [
        ("pooled", "a minute", "pooled"),
        ("plain", "peer", "default"),
    ]
    assert all(0.009 < r.ours < 0.5 for r in found.rows if r.unit == "s")
    (told,) = found.absent
    assert (told.peer, told.reason) == ("refuses", "NotImplementedError: not on this machine")


def test_memory_is_what_a_call_adds_at_its_peak(planted):
    found = runner.run(["planted"], "cpu_ref", only=["bytes"])
    assert [r.ratio_median for r in found.rows] == [pytest.approx(2.0, rel=0.1)]
    assert found.rows[0].unit == "B"


def test_a_worker_that_dies_is_an_error(planted):
    with pytest.raises(HalError, match="died"):
        runner.run(["planted"], "cpu_ref", only=["dies"])


def test_an_interrupt_ends_calls_under_way_and_keeps_what_was_measured(planted):
    start = time.monotonic()
    # A job started in the background of a script inherits an ignored SIGINT, and Python then raises nothing.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        found = runner.run(["planted"], "cpu_ref", only=["bytes", "interrupts", "dies"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.interrupted
    assert [r.name for r in found.rows] == ["bytes"]
    assert time.monotonic() - start < 50
