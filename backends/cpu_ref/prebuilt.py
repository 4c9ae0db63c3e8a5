"""Kernels that were compiled before: wheels bring them (.ci/wheel.py), so that their users need no compiler.

A source checkout has none, and compiles for its own processor. HAL_CPU_REF_NATIVE=1 makes an installed wheel do so too,
and so does a torch whose OpenMP runtime has another name than the one that the kernels ask for.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from . import cpu, openmp

FOLDER = Path(__file__).resolve().parent / "prebuilt"

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True)
class Variant:
    """Kernels for the processors of one architecture that have some features (as in cpu.features)."""

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]

    @property
    def runs_here(self) -> bool:
        """Whether this processor executes the variant's instructions."""
        return platform.machine() == self.machine and self.features <= cpu.features()


VARIANTS = (  # the best first
    Variant("x86-64-v4-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    Variant("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Variant("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Variant("aarch64", "aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
)


def variant() -> Variant | None:
    """The best variant that is installed and runs on this processor; None if the kernels have to be compiled."""
    asked = os.environ.get("HAL_CPU_REF_NATIVE") == "1" or os.environ.get("HAL_CPU_REF_SANITIZE")
    if asked or not FOLDER.is_dir() or openmp.renamed() is not None:
        return None
    return next((v for v in VARIANTS if (FOLDER / v.name).is_dir() and v.runs_here), None)
