"""cpu_ref passes the conformance kit: every op and every dtype, without waivers or refusals."""

import hal
from hal.testing import run_by_name


def test_every_op_conforms_without_a_waiver(monkeypatch):
    monkeypatch.setenv("HAL_BACKEND", "")  # hal.use sets it
    with hal.activated(hal.testing.Reference()):
        report = run_by_name("cpu_ref")
    assert report.ok, str(report)
    assert report.missing == []
    assert {row.status for row in report.rows if row.op != "device"} == {"pass"}
