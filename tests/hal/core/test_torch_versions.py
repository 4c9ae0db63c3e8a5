"""What older releases of torch lack: the tests give today's torch the behaviour of torch 2.6."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch

import hal
from hal import ops
from hal.core import residuals, torch_versions
from hal.testing import Reference


class OldEdge(NamedTuple):
    """GradientEdge of torch 2.6, which refers to the node of a Python function weakly."""

    node: Any
    output_nr: int


def test_an_edge_without_an_owner_is_kept_alive_by_the_record(monkeypatch):
    def edge(y):
        return OldEdge(*torch_get(y)[:2])

    torch_get = torch.autograd.graph.get_gradient_edge
    monkeypatch.setattr(torch.autograd.graph, "get_gradient_edge", edge)
    x = torch.randn(3, requires_grad=True)
    assert torch_versions.gradient_edge(x.exp())[1].next_functions[0][0].name() == "ExpBackward0"

    record = residuals.Record()
    y = residuals._Entry.apply(residuals._anchor(), x)
    record.edge(y)
    node = y.grad_fn
    del y
    assert node in [f for owner in record.owners for f, _ in owner.next_functions]


@pytest.mark.parametrize("found, expected", [(None, None), (torch.device("cpu"), "cpu"), (RuntimeError("none"), None)])
def test_a_machine_without_an_accelerator_has_none(monkeypatch, found, expected):
    def current_accelerator():
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert torch_versions.accelerator() == expected


def test_dtypes_are_given_as_such_or_as_numbers():
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.float16]
    assert torch_versions.given_dtypes(dtypes) == dtypes
    assert torch_versions.given_dtypes([15, 6, 7, 5]) == dtypes


def test_no_op_declares_an_optional_list_that_it_writes_to():
    lowered = hal.lower(ops.adamw)
    schema = str(lowered.torch_op.default._schema)
    assert "model_params" in schema and ")[]?" not in schema
    tensors = [[torch.randn(3)] for _ in range(4)]
    with hal.activated(Reference()):
        for model_params in (None, [torch.zeros(3, dtype=torch.bfloat16)]):
            eager = copy.deepcopy((tensors, model_params))
            lowered_call = copy.deepcopy((tensors, model_params))
            for function, (lists, copies) in ((ops.adamw, eager), (lowered, lowered_call)):
                lists[3][0].abs_()
                function(*lists, step=1, lr=0.1, model_params=copies)
            torch.testing.assert_close(eager, lowered_call, rtol=0, atol=0)
