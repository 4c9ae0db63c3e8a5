"""cpu_ref passes the conformance kit: every op and every dtype, without waivers or refusals."""

import pytest

import hal
from hal.core.op import OPS
from hal.testing import EXAMPLES, run_by_name
from hal.testing.device_checks import DEVICE
from hal.testing.kit import GOLDEN


@pytest.mark.parametrize("examples", [2, pytest.param(EXAMPLES, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("op", [*OPS, pytest.param(GOLDEN, marks=pytest.mark.slow), DEVICE])
def test_every_op_conforms_without_a_waiver(op, examples, monkeypatch):
    """All edge cases, and this number of random calls per row."""
    monkeypatch.setenv("HAL_BACKEND", "")  # hal.use sets it
    with hal.activated(hal.testing.Reference()):
        report = run_by_name("cpu_ref", ops=[op], examples=examples)
    assert report.ok, str(report)
    assert report.missing == []
    assert op == DEVICE or {row.status for row in report.rows} == {"pass"}
