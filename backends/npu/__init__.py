"""npu: HAL on Ascend NPUs through the torch_npu wheel; with simulate=True on any machine (see simulator/).

One module per family of ops. Importing this package imports neither torch_npu nor anything of the vendor's.
"""

from . import (
    activation,
    attention,
    attention_dropout,
    composed,
    low_precision,
    norm,
    optimizer,
    random,
    rotary,
    softmax,
)
from .device import Npu

__all__ = [
    "Npu",
    "activation",
    "attention",
    "attention_dropout",
    "composed",
    "low_precision",
    "norm",
    "optimizer",
    "random",
    "rotary",
    "softmax",
]
