"""The conditions of a measurement: processor, threads, the allocator's environment, and the load of other processes."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

from hal.backend_tools import processor_facts

ALLOCATORS: dict[str, dict[str, str]] = {
    # glibc's defaults: every large block is newly mapped, and the kernel clears its pages on first access.
    "default": {},
    # glibc keeps freed memory. It reads these variables when a process starts, so each setting needs its own process.
    "pooled": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "67108864"},
}

ONE_THREAD = "HAL_BENCH_ONE_THREAD"
"""Set in a worker's environment: one thread, and processor time instead of the wall clock."""
RENDEZVOUS = "HAL_BENCH_MEETING"
"""Environment variable of communicating workers: the file through which their process group is initialised."""


def environment(allocator: str, *, one_thread: bool = False) -> dict[str, str]:
    """This process's environment with exactly the requested allocator settings and threads."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "HAL_BACKEND"}
    threads = {ONE_THREAD: "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if one_thread else {}
    return {**inherited, **ALLOCATORS[allocator], **threads}


def vendor() -> str:
    """The processor's vendor as reported by the system; "" if it is not reported."""
    return processor_facts().get("vendor_id", "")


def features() -> frozenset[str]:
    """The processor's instruction sets in the kernel's spelling."""
    return frozenset((processor_facts().get("flags") or processor_facts().get("features", "")).split())


def describe(one_thread: bool = False) -> str:
    """One line for the head of a report, without the name of the host."""
    import torch

    info = processor_facts()
    model = f"{info.get('model name', platform.machine())} (family {info.get('cpu family', '?')})"
    threads = "1 thread, processor time" if one_thread else f"{torch.get_num_threads()} threads"
    return (
        f"{model}, {threads}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.libc_ver()[0]} {platform.libc_ver()[1]}"
    )


def busy_elsewhere(own: Iterable[int]) -> float:
    """Processor seconds used so far by everything except the processes `own`; 0 if the system does not report them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    # proc(5): user, nice, system, idle, iowait, irq, softirq, steal. Time stolen by the host counts as used.
    fields = [int(v) for v in stat.read_text().split("\n", 1)[0].split()[1:9]]
    ticks = sum(fields) - fields[3] - fields[4]
    for pid in own:
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks -= int(after_name[11]) + int(after_name[12])  # utime and stime
    return ticks / os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Measures the processor time of processes other than `own` from now on."""

    def __init__(self, own: Iterable[int]) -> None:
        self._own = list(own)
        self._busy, self._wall = busy_elsewhere(self._own), time.perf_counter()

    def share(self) -> float:
        """Their share of one processor so far."""
        return (busy_elsewhere(self._own) - self._busy) / max(time.perf_counter() - self._wall, 1e-9)
