"""The OpenMP runtimes of this process. The kernels must use torch's: the threads of two would compete for the cores."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

STANDARD_NAME = "libgomp.so.1"


def runtimes() -> set[str]:
    """The OpenMP runtimes loaded in this process (GNU, LLVM, Intel); empty where the system does not list libraries."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[-1] for line in lines if re.search(r"/lib(gomp|omp|iomp)[^/]*\.so", line)}


def renamed() -> str | None:
    """The path of torch's GNU runtime if the loader does not know it by its standard name.

    In the wheel of torch 2.6 for aarch64 it has another SONAME, so that a library which needs libgomp.so.1 would load
    the system's beside it. Libraries must be linked with this file instead.
    """
    gnu = [path for path in runtimes() if "/libgomp" in path]
    if len(gnu) != 1:
        return None
    try:
        ctypes.CDLL(STANDARD_NAME, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return gnu[0]
    return None
