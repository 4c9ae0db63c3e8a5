"""Facts about this machine's processor, as the operating system reports them."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path


@cache
def _facts() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    lines = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip().lower(): value.strip() for key, value in lines}


def vendor() -> str:
    """ "GenuineIntel", "AuthenticAMD", the number of an ARM implementer, or "" if the system does not report it."""
    return _facts().get("vendor_id") or _facts().get("cpu implementer", "")


def model() -> str:
    """The processor's name."""
    return _facts().get("model name") or _facts().get("cpu part") or platform.processor() or platform.machine()


def features() -> frozenset[str]:
    """Instruction sets as Linux spells them (avx2, avx512f, avx512_bf16, asimd, ...)."""
    return frozenset((_facts().get("flags") or _facts().get("features", "")).split())


def identity() -> str:
    """Everything that -march=native depends on, as text; equal on processors for which it generates the same code."""
    keys = [key for key in _facts() if re.match(r"vendor|cpu family|model|stepping|cpu (imp|arch|var|part|rev)", key)]
    return "\n".join([platform.machine(), *(_facts()[key] for key in sorted(keys)), *sorted(features())])
