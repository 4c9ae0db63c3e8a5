"""hal_opencl: a HAL backend for OpenCL devices, as a separate package.

Importing a module registers its implementations; no device is queried before `hal.use("opencl")`.
"""

from . import activation, attention, linear, moe, norm, optimizer, random, rotary, softmax, vocab  # noqa: F401
from .device import OpenCL

__all__ = ["OpenCL"]
