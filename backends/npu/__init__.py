"""npu: HAL on Ascend NPUs through the torch_npu wheel; with simulate=True on any machine (see simulator/).

There is one module per family of ops. Importing a module registers its implementations; it imports neither torch_npu
nor any other vendor package.
"""

from . import (  # noqa: F401
    activation,
    attention,
    composed,
    moe_grouped,
    moe_permute,
    moe_router,
    norm,
    optimizer,
    parallel_linear,
    random,
    rotary,
    softmax,
    vocab,
)
from .device import Npu

__all__ = ["Npu"]
