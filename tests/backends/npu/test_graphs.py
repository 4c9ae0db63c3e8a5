"""Graphs (aclgraph): torch_npu's NPUGraph records on a simulated stream, which repeats what was submitted to it."""

from __future__ import annotations

import pytest
import torch

from hal import ops


def test_a_repetition_reads_its_inputs_anew_and_writes_the_same_results(npu):
    x = torch.randn(8, 32, device=npu.device())
    weight = torch.ones(32, device=npu.device(), requires_grad=True)

    def step():
        y = ops.swiglu(ops.rms_norm(x, weight))
        (grad,) = torch.autograd.grad(y.square().sum(), weight)
        return y.detach(), grad

    repeat = npu.capture(step)
    addresses = None
    for seed in range(3):
        x.copy_(torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)))
        results = repeat()
        addresses = addresses or [t.data_ptr() for t in results]
        assert [t.data_ptr() for t in results] == addresses
        for repeated, expected in zip(results, step()):
            assert torch.equal(repeated, expected)


def test_nothing_runs_while_it_is_recorded(npu):
    total = torch.zeros(4, device=npu.device())
    repeat = npu.capture(lambda: total.add_(1))
    assert total.tolist() == [1.0] * 4  # the call before the recording
    repeat()
    repeat()
    assert total.tolist() == [3.0] * 4


def test_a_host_read_in_a_graph_is_refused_and_the_stream_remains_usable(npu):
    x = torch.ones(4, device=npu.device())
    with pytest.raises(RuntimeError, match=r"the host waits for stream \d+, which is captured"):
        npu.capture(lambda: x.sum().item())
    assert npu.capture(lambda: x * 2)().tolist() == [2.0] * 4


def test_a_side_stream_is_part_of_the_graph(npu):
    x = torch.ones(4, device=npu.device())

    def forked():
        with npu.stream():
            doubled = x * 2
        return doubled + 1

    repeat = npu.capture(forked)
    x.fill_(5.0)
    assert repeat().tolist() == [11.0] * 4
    assert (x * 2).tolist() == [10.0] * 4  # neither stream is captured any more


def test_an_event_of_a_finished_graph_cannot_be_waited_for(npu):
    x, events = torch.ones(4, device=npu.device()), []

    def marked():
        events[:] = [npu.event()]
        return x * 2

    npu.capture(marked)
    with pytest.raises(RuntimeError, match="the host waits for an event of a captured stream"):
        events[0].synchronize()
    assert (x * 2).tolist() == [2.0] * 4
