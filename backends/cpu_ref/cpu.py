"""Facts about this machine's processor, as the operating system reports them."""

from __future__ import annotations

import platform
import re

from hal.backend_tools import processor_facts


def vendor() -> str:
    """ "GenuineIntel", "AuthenticAMD", the number of an ARM implementer, or "" if the system does not report it."""
    return processor_facts().get("vendor_id") or processor_facts().get("cpu implementer", "")


def model() -> str:
    """The processor's name."""
    facts = processor_facts()
    return facts.get("model name") or facts.get("cpu part") or platform.processor() or platform.machine()


def features() -> frozenset[str]:
    """Instruction sets as Linux spells them (avx2, avx512f, avx512_bf16, asimd, ...)."""
    return frozenset((processor_facts().get("flags") or processor_facts().get("features", "")).split())


def identity() -> str:
    """Everything that -march=native depends on, as text; equal on processors for which it generates the same code."""
    facts = processor_facts()
    keys = [key for key in facts if re.match(r"vendor|cpu family|model|stepping|cpu (imp|arch|var|part|rev)", key)]
    return "\n".join([platform.machine(), *(facts[key] for key in sorted(keys)), *sorted(features())])
