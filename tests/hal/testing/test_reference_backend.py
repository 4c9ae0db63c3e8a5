"""The reference backend: complete by construction, and conforming to the kit's rules."""

import pytest
import torch

import hal
from hal import ops
from hal.testing import Reference, run


def test_it_runs_every_op_and_counts_no_fallback():
    before = hal.fallbacks()
    with hal.activated(Reference()):
        assert ops.l2norm([torch.tensor([3.0, 4.0])]) == 5.0
    assert hal.fallbacks() == before
    assert set(Reference().impls) == {op.name for op in hal.OPS.values() if op.decompose is None}


def test_it_has_one_device():
    assert Reference().device() == torch.device("cpu")
    with pytest.raises(hal.BackendUnavailable, match="has one device, cpu; asked for number 1"):
        Reference().device(1)


@pytest.mark.nightly
def test_the_references_pass_the_kit_so_the_tolerances_can_be_met():
    report = run(Reference(), examples=0)
    assert report.ok, str(report)
    assert report.missing == []
    assert {r.status for r in report.rows if r.op in hal.OPS} == {"pass"}
