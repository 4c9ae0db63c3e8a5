"""Facts about this machine's processor, as the operating system reports them."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from functools import cache

from hal.backend_tools import processor_facts


def vendor() -> str:
    """ "GenuineIntel", "AuthenticAMD", the number of an ARM implementer, or "" if the system does not report it."""
    return processor_facts().get("vendor_id") or processor_facts().get("cpu implementer", "")


def model() -> str:
    """The processor's name."""
    facts = processor_facts()
    return facts.get("model name") or facts.get("cpu part") or platform.processor() or platform.machine()


def features() -> frozenset[str]:
    """Instruction sets as Linux spells them (avx2, avx512f, avx512_bf16, asimd, ...).

    Those of AMX (amx_tile, amx_bf16, ...) are left out if the system does not permit this process to use its tiles.
    """
    flags = frozenset((processor_facts().get("flags") or processor_facts().get("features", "")).split())
    if "amx_tile" in flags and not _tiles_permitted():
        return frozenset(flag for flag in flags if not flag.startswith("amx"))
    return flags


@cache
def _tiles_permitted() -> bool:
    """Asks Linux, once per process, to permit AMX's tile registers, and whether all threads may use them."""
    arch_prctl, get_permitted, request, tile_data = 158, 0x1022, 0x1023, 18  # numbers of x86-64
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    if syscall(ctypes.c_long(arch_prctl), ctypes.c_long(request), ctypes.c_long(tile_data)) != 0:
        return False
    permitted = ctypes.c_uint64()
    done = syscall(ctypes.c_long(arch_prctl), ctypes.c_long(get_permitted), ctypes.byref(permitted))
    return bool(done == 0 and permitted.value >> tile_data & 1)


def identity() -> str:
    """Everything that -march=native depends on, as text; equal on processors for which it generates the same code."""
    facts = processor_facts()
    keys = [key for key in facts if re.match(r"vendor|cpu family|model|stepping|cpu (imp|arch|var|part|rev)", key)]
    return "\n".join([platform.machine(), *(facts[key] for key in sorted(keys)), *sorted(features())])
