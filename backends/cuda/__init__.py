"""cuda: HAL on NVIDIA GPUs (kernels/*.cu through NVRTC, attention and products through torch).

Importing needs no GPU, no driver and no CuPy. One module and one kernel file per family of ops.
"""

from . import activation, linear, norm, optimizer, random, residual, rotary, softmax, vocab
from .device import Cuda

__all__ = ["Cuda", "activation", "linear", "norm", "optimizer", "random", "residual", "rotary", "softmax", "vocab"]
