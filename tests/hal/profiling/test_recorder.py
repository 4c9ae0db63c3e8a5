"""The recorder sees every call, forward and backward, with its implementation and the reasons of those before it."""

import dataclasses
from collections import Counter

import pytest
import torch

import hal
from hal import ops
from hal.profiling import Recorder
from hal.testing.reference import Reference
from hal.testing.spy import Spy

LIST = [("linear", "backward"), ("linear", "forward"), ("rms_norm", "backward"), ("rms_norm", "forward")]


def work():
    x, w, gamma = (torch.randn(*shape, requires_grad=True) for shape in ((6, 8), (8, 8), (8,)))
    y = ops.linear(ops.rms_norm(x, gamma), w)
    y.sum().backward()
    return x.grad


@pytest.mark.parametrize("make", [Reference, hal.backend], ids=["differentiated by torch", "with its own backward"])
def test_forward_and_backward_are_counted_once_per_call(cpu_ref, make):
    backend = make()
    with hal.activated(backend):
        with Recorder(backend) as recorder:
            work()
        work()  # outside: not recorded
        rows = recorder.rows()
    assert sorted((row["op"], row["direction"]) for row in rows) == LIST
    assert all(row["calls"] == 1 and row["seconds"] > 0 and row["bytes"] > 0 for row in rows)
    flops = {row["direction"]: row["flops"] for row in rows if row["op"] == "linear"}
    assert flops == {"forward": 2 * 6 * 8 * 8, "backward": 2 * 2 * 6 * 8 * 8}
    assert "linear" in recorder.table() and "backward" in recorder.table()


def test_results_are_the_same(cpu_ref):
    torch.manual_seed(3)
    plain = work()
    torch.manual_seed(3)
    with Recorder(hal.backend()):
        assert torch.equal(work(), plain)


def test_why_not_the_first_is_recorded(cpu_ref):
    backend = Spy(hal.backend())
    first, *rest = backend.impls["rms_norm"]
    refusing = dataclasses.replace(first, id="preferred", why_not=lambda call: ("not today",), by_metadata=True)
    backend.impls = {**backend.impls, "rms_norm": [refusing, first, *rest]}
    with hal.activated(backend), Recorder(backend) as recorder:
        ops.rms_norm(torch.zeros(2, 4), torch.ones(4))
    (row,) = recorder.rows()
    assert row["implementation"] == first.id and row["refused"] == {"preferred": "not today"}


class Queued(Spy):
    """A device whose calls return before their work is done, which counts how often it was waited for."""

    waits = 0

    def capabilities(self):
        return dataclasses.replace(self.inner.capabilities(), asynchronous=True)

    def synchronize(self):
        self.waits += 1


@pytest.mark.parametrize("wait", [True, False])
def test_it_waits_for_a_device_with_a_queue_unless_told_otherwise(cpu_ref, wait):
    backend = Queued(hal.backend())
    with hal.activated(backend), Recorder(backend, wait=wait):
        before = backend.waits
        work()
        assert backend.waits - before == (8 if wait else 0)  # around each of two calls, forward and backward


def test_ops_are_ranges_of_the_devices_profiler(cpu_ref):
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        Recorder(hal.backend()) as recorder,
    ):
        work()
    names = Counter(event.key for event in profiler.key_averages())
    chosen = {row["op"]: row["implementation"] for row in recorder.rows()}
    for op, impl in chosen.items():
        assert names[f"{op} ({impl})"] == 1 and names[f"{op} ({impl}), backward"] == 1


def test_a_gradient_that_is_passed_on_moves_no_bytes(cpu_ref):
    x, residual = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    with Recorder(hal.backend()) as recorder:
        ops.bias_dropout_add(x, None, residual).sum().backward()
    moved = {row["direction"]: row["bytes"] for row in recorder.rows()}
    assert moved["backward"] == 0 and moved["forward"] > 0
