"""What the operating system reports of the processor, for kernels and measurements that depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def processor_facts() -> Mapping[str, str]:
    """Facts about this machine's first processor by the names of Linux's /proc/cpuinfo, in lower case.

    Names depend on the architecture: "vendor_id" and "flags" on x86-64, "cpu implementer" and "features" on Arm. Empty
    where there is no such file. It is read once per process.
    """
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    lines = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip().lower(): value.strip() for name, value in lines}
