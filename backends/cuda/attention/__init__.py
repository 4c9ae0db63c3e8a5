"""Attention on CUDA: torch's kernels, one module each, in the default order of preference (order.py)."""

from . import flash, cudnn, sdpa, flex, unfused  # isort: skip  # the order of registration
from .order import DEFAULT, MEASURED, measured_on, order_for

__all__ = ["DEFAULT", "MEASURED", "cudnn", "flash", "flex", "measured_on", "order_for", "sdpa", "unfused"]
