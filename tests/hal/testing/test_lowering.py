"""The kit's row about tracing: it fails where a graph breaks, and where a compiled call has other results."""

import planted
import torch

import hal
from hal import ops
from hal.testing import lowering


def row_of(function):
    """The kit's row about the lowered swiglu of a backend whose implementation is `function`."""
    return lowering.check_lowered(planted.plant(ops.swiglu, function), ops.swiglu)


def test_an_op_that_breaks_the_graph_is_caught(monkeypatch):
    def broken(*args, **kwargs):
        torch._dynamo.graph_break()
        return ops.swiglu.reference(*args, **kwargs)

    assert row_of(ops.swiglu.reference).status == "pass"
    monkeypatch.setattr(type(ops.swiglu).__call__, "_torchdynamo_inline", broken)
    row = row_of(ops.swiglu.reference)
    assert row.status == "fail" and "a full graph raised" in row.message and "graph_break" in row.message
    assert "fullgraph=True" in row.code


def test_other_results_in_a_graph_are_caught(monkeypatch):
    monkeypatch.setattr(lowering, "_opcheck", lambda *call: "")  # would see it, too
    calls = []

    def counting(x, bias):
        calls.append(1)
        return ops.swiglu.reference(x, bias) + len(calls)

    assert row_of(counting).message == "in a full graph, other results than in an eager call: the output"


def test_an_op_that_draws_is_traced_with_its_random_stream(monkeypatch):
    seen = []
    monkeypatch.setattr(lowering, "_opcheck", lambda backend, op, sample: "")
    monkeypatch.setattr(lowering, "_full_graph", lambda backend, op, sample: seen.append(sample) or "")
    assert lowering.check_lowered(hal.testing.Reference(), ops.dropout).samples == 2
    assert [sample.args[2] is None for sample in seen] == [True, False]
