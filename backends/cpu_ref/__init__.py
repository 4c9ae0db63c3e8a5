"""cpu_ref: HAL on any CPU, with kernels in C compiled for the machine on first use (see build.py).

The readable reference backend: one module and one kernel file per family of ops. Nothing is compiled at import.
"""

from . import activation, attention, linear, norm, optimizer, random, residual, rotary, softmax, vocab
from .device import CpuRef

__all__ = [
    "CpuRef",
    "activation",
    "attention",
    "linear",
    "norm",
    "optimizer",
    "random",
    "residual",
    "rotary",
    "softmax",
    "vocab",
]
