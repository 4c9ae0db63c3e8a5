"""The code shown in a failing row can be pasted and run, and fails in the same way."""

import math

import host_backend
import pytest
import torch

import hal
from hal import DtypeSpec, Rng, Sample, TensorSpec, ops
from hal.testing import Failure, calls, run_by_name

WRONG = f"""{host_backend.SOURCE}from hal import ops

class Wrong(HostBackend):
    name = "wrong"
    def __init__(self, extra: float = 0.0):
        self.extra = extra

@Wrong.impl(ops.layer_norm, id="wrong/biased")
def layer_norm(x, weight, bias, eps=1e-5):
    y = ops.layer_norm.reference(x, weight, bias, eps)
    return y + hal.backend().extra if x.shape[-1] > 20 else y

@Wrong.impl(ops.embedding, id="wrong/sharded")
def embedding(weight, ids, *, vocab_start=0, comm=None):
    return ops.embedding.reference(weight, ids % len(weight), vocab_start=0, comm=None)
"""


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    (tmp_path / "wrong_backend.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(hal.core.registry.IN_TREE, "wrong", "wrong_backend:Wrong")
    monkeypatch.delenv("HAL_BACKEND", raising=False)
    with hal.activated(hal.testing.Reference()):
        yield "wrong"


@pytest.mark.parametrize("op", ["layer_norm", "embedding"])
def test_the_code_of_a_failure_fails_in_the_same_way(wrong, op):
    report = run_by_name(wrong, {"extra": 0.5}, ops=[op], examples=20)
    assert report.failed
    for row in report.failed:
        with pytest.raises(Failure) as caught:
            exec(compile(row.code, "snippet", "exec"), {})
        assert caught.value.message == row.message


def test_the_code_stops_failing_when_the_backend_is_right(wrong):
    row = run_by_name(wrong, {"extra": 0.5}, ops=["layer_norm"], examples=20).failed[0]
    exec(row.code.replace("extra=0.5", "extra=0.0"), {})


def test_a_random_failing_call_is_shrunk(wrong):
    # Edge cases with more than 20 columns fail first; without them hypothesis finds 21 columns, the smallest.
    before = ops.layer_norm.edge_cases
    ops.layer_norm.edge_cases = lambda: before()[:1]
    try:
        row = run_by_name(wrong, {"extra": 0.5}, ops=["layer_norm"], examples=60).failed[0]
    finally:
        ops.layer_norm.edge_cases = before
    assert "sample = Sample((TensorSpec((21,)), TensorSpec((21,)), TensorSpec((21,))), {'eps': 1e-05})" in row.code


@pytest.mark.parametrize(
    "sample",
    [
        Sample((TensorSpec((3, 4)), None, [TensorSpec(()), TensorSpec((2,), "int", high=5, dtype=torch.int64)])),
        Sample((TensorSpec((2,), "values", values=(math.inf, -math.inf)),), {"rng": Rng(7, 9), "p": 0.5}, grad=False),
        Sample(
            (TensorSpec((4, 4), scale=20.0, strided="last"), TensorSpec((4,), "bool", p=0.1)),
            {"layout": "TND", "x": None},
        ),
        Sample((TensorSpec((2, 2)), Rng(1).block((4, 4), (2, 2)))),
        *(s for op in hal.OPS.values() for s in op.edge_cases() if "nan" not in repr(s)),
    ],
)
def test_the_code_of_a_sample_makes_that_sample(sample):
    scope = {"DtypeSpec": DtypeSpec, "Sample": Sample, "TensorSpec": TensorSpec, "Rng": Rng, "torch": torch}
    assert eval(calls.code(sample), scope) == sample


def test_the_code_of_nan_is_python():
    spec = eval(calls.code(TensorSpec((1,), "values", values=(math.nan,))), {"TensorSpec": TensorSpec})
    assert math.isnan(spec.values[0])
