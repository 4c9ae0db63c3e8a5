"""hal_opencl: a HAL backend for OpenCL devices, as a package of its own."""

from . import activation, attention, linear, norm, optimizer, random, rotary, softmax, vocab
from .device import OpenCL

__all__ = [
    "OpenCL",
    "activation",
    "attention",
    "linear",
    "norm",
    "optimizer",
    "random",
    "rotary",
    "softmax",
    "vocab",
]
