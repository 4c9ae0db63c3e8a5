"""Attention on CUDA: torch's kernels, one module each, in the default order of preference (../order.py)."""

from . import flash, cudnn, sdpa, flex, unfused  # isort: skip  # the order of registration

__all__ = ["cudnn", "flash", "flex", "sdpa", "unfused"]
