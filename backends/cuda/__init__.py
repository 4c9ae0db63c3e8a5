"""cuda: HAL on NVIDIA GPUs (kernels/*.cu through NVRTC, attention and products through torch).

Importing needs no GPU, no driver and no CuPy. There is one module and one kernel file per family of ops; importing a
module registers its implementations.
"""

from . import (  # noqa: F401
    activation,
    attention,
    cublaslt,
    float8,
    linear,
    moe_grouped,
    moe_permute,
    moe_router,
    norm,
    optimizer,
    parallel_linear,
    random,
    residual,
    rotary,
    softmax,
    vocab,
)
from .device import Cuda

__all__ = ["Cuda"]
