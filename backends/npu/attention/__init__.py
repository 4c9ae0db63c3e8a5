"""Attention on Ascend: npu_fusion_attention, with one module per kind of call, and an unfused fallback."""

from . import fusion, unfused, low_precision  # isort: skip  # the order of registration

__all__ = ["fusion", "low_precision", "unfused"]
