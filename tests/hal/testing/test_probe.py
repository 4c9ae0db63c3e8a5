"""check_probe: a probe returns the same facts twice, raises nothing and initialises no device."""

import sys
import types

import pytest
import torch
from planted import Cpu

import hal
from hal.testing import ProbeFailure, check_probe, run_by_name


def backend(monkeypatch, probe):
    cls = type("Probed", (Cpu,), {"name": "probed", "probe": probe})
    module = types.ModuleType("probed_module")
    module.Probed = cls
    monkeypatch.setitem(sys.modules, "probed_module", module)
    monkeypatch.setitem(hal.core.registry.IN_TREE, "probed", "probed_module:Probed")


def test_a_pure_probe_is_returned(monkeypatch):
    backend(monkeypatch, lambda self: hal.Probe(True, 2, "two cards"))
    assert check_probe("probed") == hal.Probe(True, 2, "two cards")


def raises(self):
    raise OSError("libacme.so")


@pytest.mark.parametrize(
    "probe, message",
    [
        (raises, r"raised OSError: libacme\.so"),
        (lambda self: hal.Probe(True, 1, f"at {id(object())} {torch.rand(())}"), "is not pure"),
        (lambda self: (True, 1), r"returned tuple, not hal\.Probe"),
        (lambda self: hal.Probe(True, 1, ""), "must give a reason"),
        (lambda self: hal.Probe(True, 0, "none"), "ok exactly if count > 0"),
        (lambda self: hal.Probe(False, 1, "one"), "ok exactly if count > 0"),
    ],
    ids=["raises", "impure", "another type", "no reason", "ok without devices", "devices but not ok"],
)
def test_an_impure_probe_is_a_failure_that_names_it(monkeypatch, probe, message):
    backend(monkeypatch, probe)
    with pytest.raises(ProbeFailure, match=message):
        check_probe("probed")


def test_a_probe_that_initialises_the_device_is_caught(monkeypatch):
    started = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(started))
    backend(monkeypatch, lambda self: started.append(1) or hal.Probe(True, 1, "a card"))
    with pytest.raises(ProbeFailure, match=r"initialised the device \(cuda\)"):
        check_probe("probed")


def test_a_failing_probe_is_a_row_of_the_report(monkeypatch):
    monkeypatch.setenv("HAL_BACKEND", "")
    backend(monkeypatch, lambda self: hal.Probe(True, 1, f"{torch.rand(())}"))
    with hal.activated(hal.testing.Reference()):
        report = run_by_name("probed", ops=[], examples=0)
    assert [(r.op, r.status) for r in report.rows] == [("probe", "fail")]
    assert not report.ok
