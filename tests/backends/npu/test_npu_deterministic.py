"""hal.use("npu", deterministic=True): CANN's switch is on for every operator, and HCCL's for its reductions."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import hal
from hal import ops
from hal.backends.npu import Npu, simulator


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mode is one of the process."""
    monkeypatch.setenv("HAL_SIMULATE", "")  # which building a simulated backend sets
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("HCCL_DETERMINISTIC", "")
    monkeypatch.delenv("HCCL_DETERMINISTIC")
    yield
    torch.use_deterministic_algorithms(False)


def test_every_operator_runs_in_canns_deterministic_mode(machine: simulator.Simulator) -> None:
    backend = Npu(simulate=True, deterministic=True)
    backend.build()
    with hal.activated(backend):
        q = torch.randn(1, 2, 16, 8, device=hal.device(), requires_grad=True)
        hal.synchronize()
        before = machine.counters()
        ops.flash_attention(q, q, q, layout="BNSD").sum().backward()
        hal.synchronize()
        during = machine.counters()
        torch.use_deterministic_algorithms(False)
        ops.swiglu(q.detach())
        hal.synchronize()
        after = machine.counters()
    operators = during["operators"] - before["operators"]
    assert operators > 0 and during["deterministic"] - before["deterministic"] == operators
    assert after["operators"] > during["operators"] and after["deterministic"] == during["deterministic"]
    assert os.environ["HCCL_DETERMINISTIC"] == "true" and not torch.utils.deterministic.fill_uninitialized_memory


def test_a_device_is_deterministic_only_in_that_mode(npu: Npu) -> None:
    assert not Npu(simulate=False).capabilities().deterministic
    assert Npu(simulate=False, deterministic=True).capabilities().deterministic
    assert Npu(simulate=True).capabilities().deterministic
