"""What the device can do is measured in the dtypes asked for, and not on a simulator."""

import torch

import hal
from hal.profiling import ceilings
from hal.testing.spy import Spy


def test_rates_are_those_of_the_dtypes_asked_for(cpu_ref, monkeypatch):
    monkeypatch.setattr(ceilings, "SIZE", 64)
    monkeypatch.setattr(ceilings, "COPIED", 1 << 16)
    monkeypatch.setattr(ceilings, "_seconds", lambda backend, run: (run(), 2.0)[1])
    measured = ceilings.measure(hal.backend(), hal.device(), {torch.float32, torch.bfloat16, torch.float64})
    assert measured is not None and set(measured.products) == {"float32", "bfloat16"}
    assert measured.copy == float(1 << 16) and measured.products["float32"] == float(64**3)


def test_a_simulator_has_no_ceilings(cpu_ref):
    simulated = Spy(hal.backend())
    simulated.simulated = True
    assert ceilings.measure(simulated, hal.device(), {torch.float32}) is None
