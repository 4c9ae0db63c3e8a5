"""cuda: HAL on NVIDIA GPUs (kernels/*.cu through NVRTC, attention and products through torch).

Importing needs no GPU, no driver and no CuPy. One module and one kernel file per family of ops.
"""

from . import activation, attention, linear, norm, optimizer, random, residual, rotary, softmax, vocab
from .device import Cuda

__all__ = [
    "Cuda",
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
