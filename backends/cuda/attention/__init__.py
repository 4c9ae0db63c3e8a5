"""Attention on CUDA: torch's kernels and HAL's own, one module each; ../order.py has the order of preference."""

from . import flash, flash_wheels, cudnn, sdpa, flex, fused, unfused  # isort: skip  # the order of registration

__all__ = ["cudnn", "flash", "flash_wheels", "flex", "fused", "sdpa", "unfused"]
