"""cpu_ref: HAL on any CPU, with kernels in C compiled for the machine on first use (see build.py).

The readable reference backend: one module and one kernel file per family of ops. Importing a module registers
its implementations and compiles nothing.
"""

from . import activation, attention, linear, norm, optimizer, random, residual, rotary, softmax, vocab  # noqa: F401
from .device import CpuRef

__all__ = ["CpuRef"]
