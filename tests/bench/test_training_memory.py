"""Peak memory: what `hal bench train` measures of it, and that a thousand steps of the real trainer do not raise it."""

from __future__ import annotations

import os

import pytest
import torch

import hal
from hal.backends.cpu_ref import CpuRef
from hal.bench import resident, train, worker
from hal.bench.layout import config_of, trainer_of
from hal.errors import HalError
from hal.testing.processes import run_processes

MIB = 2**20
SMALL = {**train.SMALL, "backend": "cpu_ref", "hidden_dropout": 0.1, "global_batch_size": 8}
CREEP = 8 * MIB
"""Bytes that 900 steps may add. malloc comes to touch one or two MiB of pages up to step 1,000, and hardly any later; a
tensor of 16 KiB kept per step adds 14 MiB to that."""
LAYOUTS = {
    "one process": (1, {}),
    "two, tensor parallel": (2, {"tensor_model_parallel_size": 2}),
    "two, data parallel": (2, {}),
}
"""Processes and options. Not ZeRO's: under torch's fully_shard malloc comes to touch some 64 MiB more, at no step that
one could name, while what is in use stays the same."""

unsanitized = pytest.mark.skipif("HAL_CPU_REF_SANITIZE" in os.environ, reason="the sanitizer keeps what is freed")


def _growth(options: dict, leak: int) -> int:
    """Bytes by which the peak grows from step 100 to 1,000 on this rank; `leak` bytes are kept at every step."""
    worker._backend = hal.use("cpu_ref")
    trainer, kept = trainer_of(config_of(options)), []

    def step() -> None:
        trainer.step()
        if leak:
            kept.append(torch.ones(leak, dtype=torch.uint8))

    first, last = resident.peaks_after(step, (100, 1000))
    return last - first


@pytest.mark.slow
@unsanitized
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_does_not_creep_over_a_thousand_steps(layout: str) -> None:
    world, options = LAYOUTS[layout]
    grown = run_processes(world, _growth, {**SMALL, **options}, 0, timeout=240.0)
    assert max(grown) <= CREEP, [f"{n / MIB:.2f} MiB" for n in grown]


@pytest.mark.slow
@unsanitized
def test_a_leak_of_16_kib_per_step_is_seen() -> None:
    (grown,) = run_processes(1, _growth, SMALL, 16 << 10, timeout=240.0)
    assert grown > CREEP


class Counting(CpuRef):
    """Says what the test made it hold."""

    held = most = 1000

    def hold(self, more: int) -> None:
        self.held += more
        self.most = max(self.most, self.held)

    def reset_peak_memory(self) -> None:
        self.most = self.held

    def memory_stats(self) -> dict[str, int]:
        return {"allocated": self.held, "peak": self.most}


@pytest.fixture
def counting(monkeypatch) -> Counting:
    backend = Counting()
    monkeypatch.setattr(worker, "_backend", backend)
    return backend


def test_the_peak_counts_from_before_the_model_is_made(counting) -> None:
    def make():
        counting.hold(30)

        def step() -> None:
            counting.hold(7)
            counting.hold(-6)

        return step

    counting.hold(5000)
    counting.hold(-5000)  # what was there at most before does not count
    assert resident.peak_of(make, 3)() == 30 + 2 + 7


def test_peaks_are_taken_after_so_many_steps(counting) -> None:
    assert resident.peaks_after(lambda: counting.hold(8), (1, 3, 10)) == [1008, 1024, 1080]


def test_a_backend_that_does_not_count_is_no_peak_of_zero(counting, monkeypatch) -> None:
    monkeypatch.setattr(Counting, "memory_stats", lambda self: {})
    with pytest.raises(HalError, match="does not say how much memory"):
        resident.peak_of(lambda: lambda: None, 1)
