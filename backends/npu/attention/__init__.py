"""Attention on Ascend: npu_fusion_attention, with one module per kind of call, an unfused fallback, and the merging of
results over parts of the keys."""

from . import fusion, unfused, low_precision, merge  # isort: skip  # the order of registration

__all__ = ["fusion", "low_precision", "merge", "unfused"]
