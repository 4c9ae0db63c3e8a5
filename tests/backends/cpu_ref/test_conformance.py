"""cpu_ref passes the conformance kit: every op and every dtype, without waivers or refusals."""

import pytest

import hal
from hal.testing import EXAMPLES, run_by_name


@pytest.mark.parametrize("examples", [2, pytest.param(EXAMPLES, marks=pytest.mark.nightly)])
def test_every_op_conforms_without_a_waiver(examples, monkeypatch):
    """All edge cases, and this number of random calls per row."""
    monkeypatch.setenv("HAL_BACKEND", "")  # hal.use sets it
    with hal.activated(hal.testing.Reference()):
        report = run_by_name("cpu_ref", examples=examples)
    assert report.ok, str(report)
    assert report.missing == []
    assert {row.status for row in report.rows if row.op != "device"} == {"pass"}
