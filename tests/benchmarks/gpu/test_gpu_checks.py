"""The checks of `make gpu` make valid calls, and find what they are for: on fakes of the features that need a GPU."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
import types

import pytest
import torch
from torch_release import newer_torch

import hal
from hal.backends.cuda import Cuda, device, launch
from hal.backends.cuda.attention import flash_wheels
from hal.bench.gpu import checks as gpu_checks
from hal.bench.gpu import parts as gpu_parts
from hal.bench.gpu.rehearsal import Gpu, Rehearsal
from hal.testing.sharded_processes import OPS as BETWEEN_PROCESSES


class Fake(Cuda):
    """The simulator with the device features that the checks use."""

    def event(self):
        return types.SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)

    def memory_stats(self):
        return {"allocated": 0, "peak": 64 << 20, "reserved": 64 << 20, "total": 1 << 30}


@pytest.fixture
def fake():
    backend = Fake(simulate=True)
    if not backend.probe().ok:
        pytest.skip(backend.probe().reason)
    backend.build()
    with hal.activated(backend):
        yield backend


NEED_A_GPU = {"streams", "cuBLAS", "clocks"}


@newer_torch("cuda needs 2.11")
def test_the_checks_of_a_device_make_valid_calls_of_every_implementation(fake, monkeypatch):
    monkeypatch.setattr(gpu_checks, "_no_scores", lambda backend: "")
    checks = [check for check in gpu_checks.checks(fake) if check.needs not in NEED_A_GPU - {"clocks"}]
    outcomes = {check.name: gpu_checks.outcome(check.run) for check in checks}
    problems = {name: row["problem"] for name, row in outcomes.items() if row.get("problem")}
    assert list(problems) == ["memory statistics"] and "64 MiB show as [0, 67108864] bytes" in str(problems)
    fused = [(n, i) for n in BETWEEN_PROCESSES for i in fake.implementations(hal.OPS[n]) if not i.composed]
    assert [i.id for _, i in fused] == ["cuda/symm_mem"] * 2
    assert sum(name.startswith("graph of") for name in outcomes) == sum(
        len(fake.implementations(op)) for op in hal.OPS.values()
    ) - len(fused)


def test_an_implementation_that_refuses_graphs_is_absent(fake, monkeypatch):
    check = next(c for c in gpu_checks.checks(fake) if c.name == "graph of grouped_linear_wgrad cuda/loop")
    assert "a CUDA graph is being captured" in gpu_checks.outcome(check.run)["absent"]
    monkeypatch.setattr(launch, "capturing", lambda: True)
    assert list(gpu_checks.outcome(check.run)) == ["problem"]  # it accepts no call at all


def test_an_implementation_that_is_not_available_is_absent(fake, monkeypatch):
    monkeypatch.setattr(flash_wheels, "_missing", lambda wheel, path: f"{wheel.package} is not installed")
    check = next(c for c in gpu_checks.checks(fake) if c.name == "graph of flash_attention cuda/fa3")
    assert gpu_checks.outcome(check.run) == {"absent": "flash-attn-3 is not installed"}


def test_a_rehearsal_says_which_checks_it_cannot_run(fake, monkeypatch):
    monkeypatch.setattr(hal, "use", lambda name, **options: fake)
    units, everywhere = dict(gpu_parts.checks(Rehearsal())), dict(gpu_parts.checks(Gpu()))
    assert units["memory statistics"]() == [
        {"name": "memory statistics", "absent": "the simulator has no memory of its own"}
    ]
    assert units["kernels in a new thread"]() == [{"name": "kernels in a new thread", "problem": ""}]
    assert everywhere["memory statistics"]()[0]["problem"]
    needs = {check.needs for check in gpu_checks.checks(fake)} - {""}
    assert needs == set(Rehearsal.lacks) - {"compile"} >= NEED_A_GPU


def test_a_graph_whose_results_differ_is_a_problem(fake, monkeypatch):
    captured = []

    def capture(function):
        with monkeypatch.context() as m:  # a kernel that was not captured does not write its output
            m.setattr(launch, "run", lambda *a, **k: captured.append(a))
            result = function()
        return lambda: result

    fake.capture = capture
    impl = fake.impls["rms_norm"][0]
    assert "differ in bits" in gpu_checks._graph(fake, impl.op, impl) and captured


class Streams:
    """torch.cuda's streams: each runs its work in order, at times of its own, when the host synchronises.

    Work is (stream, ready, seconds, function): it begins when its stream has finished what was queued before and the
    time `ready` of the streams that it waits for has come. All of it runs in the order of these times.
    """

    def __init__(self):
        self.current = self.default = types.SimpleNamespace(at=0.0)
        self.default.wait_stream = lambda other: self.wait(self.default, other)
        self.work = []

    def stream(self):
        made = types.SimpleNamespace(at=0.0)
        made.wait_stream = lambda other: self.wait(made, other)
        return made

    def wait(self, stream, other):
        stream.at = max(stream.at, other.at)

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def queue(self, seconds, function):
        self.current.at += seconds
        self.work.append((self.current.at, len(self.work), function))

    def synchronize(self):
        for _, _, function in sorted(self.work, key=lambda item: item[:2]):
            function()
        self.work.clear()


@pytest.fixture
def streams(monkeypatch):
    """A backend whose kernels run on fakes of torch.cuda's streams, and whose delays last longer than its kernels."""
    backend, fake = Cuda(simulate=True), Streams()
    if not backend.probe().ok:
        pytest.skip(backend.probe().reason)
    backend.build()
    run = launch.run
    monkeypatch.setattr(launch, "run", lambda *a, **k: fake.queue(1.0, lambda: run(*a, **k)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "Stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(gpu_checks, "_delay", lambda: fake.queue(100.0, lambda: None))
    # The results that the check compares are those of kernels that have run.
    equal = gpu_checks.equal_bits
    monkeypatch.setattr(gpu_checks, "equal_bits", lambda a, b: fake.synchronize() or equal(a, b))
    backend.synchronize = fake.synchronize
    with hal.activated(backend):
        backend.simulated, place = False, torch.device("cpu")  # so that stream() is the device's
        backend.device = lambda index=0: place
        yield backend


def test_streams_in_order_pass(streams):
    assert gpu_checks._late_producers(streams) == ""


WAITS = {
    "entering": "side.wait_stream(outer)",
    "leaving": "outer.wait_stream(side)",
    "the wrong stream": "with torch.cuda.stream(side)",
}


@pytest.mark.parametrize("fault", WAITS)
def test_a_missing_wait_or_a_wrong_stream_is_found(streams, fault):
    """Planted in the source of Backend.stream."""
    source = inspect.getsource(device.Cuda.stream)
    assert WAITS[fault] in source, f"stream() no longer contains {WAITS[fault]!r}; plant the fault elsewhere"
    planted = {"the wrong stream": "with torch.cuda.stream(torch.cuda.Stream())"}.get(fault, "pass")
    scope = {**vars(device)}
    exec(textwrap.dedent(source.replace(WAITS[fault], planted)), scope)
    streams.stream = types.MethodType(scope["stream"], streams)
    assert gpu_checks._late_producers(streams) == "a kernel ran before the late kernel whose result it reads"


def test_a_delay_that_is_too_short_to_show_a_missing_wait_is_a_problem(streams, monkeypatch):
    monkeypatch.setattr(gpu_checks, "_delay", lambda: None)
    assert "goes unnoticed" in gpu_checks._late_producers(streams)


def test_scores_in_memory_are_a_problem(monkeypatch):
    peak = []
    backend = types.SimpleNamespace(
        device=lambda: torch.device("cpu"), reset_peak_memory=lambda: None, memory_stats=lambda: peak.pop()
    )
    monkeypatch.setattr(hal.ops, "flash_attention", lambda q, k, v, **how: q + k + v)
    for used, problem in ((200, "it used 200 MiB; the scores are 128"), (10, "")):
        peak[:] = [{"peak": used << 20}, {"allocated": 0}]
        assert gpu_checks._no_scores(backend) == problem


def test_rounded_sums_are_a_problem(fake):
    assert "in the place of" in gpu_checks._float32_sums(fake)  # the simulator rounds them, see docs/cuda-simulator.md


@pytest.mark.slow
def test_steps_run_while_host_reads_raise(fake, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert gpu_checks._no_host_reads(fake) == ""
    assert modes == ["error", "default"]
