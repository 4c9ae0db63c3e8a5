"""cpu_ref: HAL on any CPU, with kernels in C compiled for the machine on first use (see build.py).

The readable reference backend: one module and one kernel file per family of ops. Importing a module registers
its implementations and compiles nothing.
"""

from . import (  # noqa: F401
    activation,
    attention,
    composite,
    float8,
    linear,
    moe_grouped,
    moe_permute,
    moe_router,
    norm,
    optimizer,
    random,
    residual,
    rotary,
    softmax,
    vocab,
)
from .device import CpuRef

__all__ = ["CpuRef"]
