"""npu: HAL on Ascend NPUs through the torch_npu wheel; with simulate=True on any machine (see simulator/).

There is one module per family of ops. Importing a module registers its implementations; it imports neither torch_npu
nor any other vendor package.
"""

from . import activation, attention, composed, norm, optimizer, random, rotary, softmax  # noqa: F401
from .device import Npu

__all__ = ["Npu"]
