"""The backend itself: correct memory figures, memory that is kept for reuse, one device."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys

import pytest
import torch

import hal
from hal.backends.cpu_ref import CpuRef
from hal.testing.processes import run_processes

THREADS = """
import threading, torch, hal
from hal import ops
hal.use("cpu_ref")
x = torch.randn(64, 8192, requires_grad=True)
def work():
    ops.rms_norm(x, torch.ones(8192, requires_grad=True)).sum().backward()
def rss():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) // 1024
def run(count):
    for _ in range(count):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
run(20)
before = rss()
run(60)
print(rss() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("HAL_CPU_REF_SANITIZE" in os.environ, reason="the sanitizer delays the release of freed memory")
def test_threads_leave_no_scratch_behind() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30, "MiB of growth; a leak would add about 1 MiB per thread"


FAULTS = """
import resource, sys, torch, hal
hal.use("cpu_ref", keep_memory=sys.argv[1] == "keep")
x = torch.ones(16, 1 << 20)
def step():
    return hal.ops.swiglu(x).sum().item()  # 32 MiB; torch's own blocks leave slivers (memory.py), hence none here
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4): step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


SIZE = 64 << 20


def _figures() -> list[dict[str, int]]:
    """Memory figures before a block of SIZE bytes, with it, after it is freed, and after a reset of the peak."""
    backend = CpuRef()
    backend.reset_peak_memory()
    figures = [backend.memory_stats()]
    block = mmap.mmap(-1, SIZE)
    block.write(b"x" * SIZE)
    figures.append(backend.memory_stats())
    block.close()
    figures.append(backend.memory_stats())
    backend.reset_peak_memory()
    return [*figures, backend.memory_stats()]


@pytest.mark.skipif("HAL_CPU_REF_SANITIZE" in os.environ, reason="the sanitizer delays the release of freed memory")
def test_memory_figures_follow_the_process() -> None:
    (figures,) = run_processes(1, _figures)  # in a separate process, where nothing else allocates or frees
    before, during, after, restarted = figures
    assert during["allocated"] - before["allocated"] > SIZE * 3 // 4 and during["peak"] >= during["allocated"]
    assert after["allocated"] < during["allocated"] and after["peak"] >= during["allocated"] - (1 << 20)
    assert restarted["peak"] < during["peak"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
@pytest.mark.skipif("HAL_CPU_REF_SANITIZE" in os.environ, reason="the sanitizer brings its own malloc")
def test_freed_memory_is_reused_unless_told_otherwise() -> None:
    def faults(how: str, **extra: str) -> int:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | extra
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, env=env, check=True)
        return int(done.stdout)

    pages_per_step = (32 << 20) // resource.getpagesize()  # faults() counts those of four steps
    assert faults("keep") < pages_per_step
    assert faults("leave") > 2 * pages_per_step
    assert faults("keep", MALLOC_ARENA_MAX="2") > 2 * pages_per_step  # the user's own malloc settings take precedence


def test_there_is_one_device() -> None:
    backend = CpuRef()
    assert backend.device() == torch.device("cpu")
    with pytest.raises(hal.HalError, match="one device"):
        backend.device(1)
    assert backend.options() == {"keep_memory": True, "shared_memory": True}
