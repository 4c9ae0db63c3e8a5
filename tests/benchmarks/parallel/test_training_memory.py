"""Peak memory: how `hal bench train` measures it, and that a thousand steps of the trainer do not raise it."""

from __future__ import annotations

import os

import pytest
import torch

import hal
from hal.backends.cpu_ref import CpuRef
from hal.bench.harness import peak_rss, target
from hal.bench.parallel.layout import config_of, trainer_of
from hal.bench.suites import train
from hal.errors import HalError
from hal.testing.processes import run_processes

MIB = 2**20
SMALL = {**train.SMALL, "backend": "cpu_ref", "hidden_dropout": 0.1, "global_batch_size": 8}
CREEP = 8 * MIB
"""Bytes that 900 steps may add. Fragmentation adds one or two MiB up to step 1,000 and hardly any later; a leak of
16 KiB per step adds 14 MiB."""
LAYOUTS = {
    "one process": (1, {}),
    "two, tensor parallel": (2, {"tensor_model_parallel_size": 2}),
    "two, data parallel": (2, {}),
}
"""Processes and options. ZeRO is not among them: under torch's fully_shard malloc touches some 64 MiB more at an
unpredictable step, while the memory in use stays the same."""

unsanitized = pytest.mark.skipif("HAL_CPU_REF_SANITIZE" in os.environ, reason="the sanitizer keeps freed memory")


def _growth(options: dict, leak: int) -> int:
    """Bytes by which this rank's peak grows from step 100 to 1,000 if every step leaks `leak` bytes."""
    target.set_backend(hal.use("cpu_ref"))
    trainer, leaked = trainer_of(config_of(options)), []

    def step() -> None:
        trainer.step()
        if leak:
            leaked.append(torch.ones(leak, dtype=torch.uint8))

    first, last = peak_rss.peaks_after(step, (100, 1000))
    return last - first


@pytest.mark.nightly
@unsanitized
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_does_not_creep_over_a_thousand_steps(layout: str) -> None:
    world, options = LAYOUTS[layout]
    growth = run_processes(world, _growth, {**SMALL, **options}, 0, timeout=240.0)
    assert max(growth) <= CREEP, [f"{n / MIB:.2f} MiB" for n in growth]


@pytest.mark.nightly
@unsanitized
def test_a_leak_of_16_kib_per_step_is_detected() -> None:
    (growth,) = run_processes(1, _growth, SMALL, 16 << 10, timeout=240.0)
    assert growth > CREEP


class Counting(CpuRef):
    """Reports the memory that the test pretends to allocate."""

    allocated = peak = 1000

    def allocate(self, more: int) -> None:
        self.allocated += more
        self.peak = max(self.peak, self.allocated)

    def reset_peak_memory(self) -> None:
        self.peak = self.allocated

    def memory_stats(self) -> dict[str, int]:
        return {"allocated": self.allocated, "peak": self.peak}


@pytest.fixture
def counting(monkeypatch) -> Counting:
    backend = Counting()
    monkeypatch.setattr(target, "_backend", backend)
    return backend


def test_the_peak_counts_from_before_the_model_is_made(counting) -> None:
    def make():
        counting.allocate(30)

        def step() -> None:
            counting.allocate(7)
            counting.allocate(-6)

        return step

    counting.allocate(5000)
    counting.allocate(-5000)  # an earlier peak does not count
    assert peak_rss.peak_of(make, 3)() == 30 + 2 + 7


def test_peaks_are_taken_after_the_given_numbers_of_steps(counting) -> None:
    assert peak_rss.peaks_after(lambda: counting.allocate(8), (1, 3, 10)) == [1008, 1024, 1080]


def test_a_backend_without_memory_statistics_is_an_error(counting, monkeypatch) -> None:
    monkeypatch.setattr(Counting, "memory_stats", lambda self: {})
    with pytest.raises(HalError, match="reports no memory statistics"):
        peak_rss.peak_of(lambda: lambda: None, 1)
