"""Ops for which Ascend has no operator: their reference in hal.ops, run on the device by torch_npu's operators.

torch computes the gradients.
"""

from __future__ import annotations

from hal import ops

from .device import Npu
from .tensors import refuses

ID = "npu/torch"

Npu.impl(ops.embedding, id=ID, why_not=refuses(ops.embedding))(ops.embedding.reference)
Npu.impl(ops.linear, id=ID, why_not=refuses(ops.linear))(ops.linear.reference)
Npu.impl(ops.linear_wgrad, id=ID, why_not=refuses(ops.linear_wgrad, "x", "dy", "main_grad", "main_bias_grad"))(
    ops.linear_wgrad.reference
)
Npu.impl(ops.l2norm, id=ID, why_not=refuses(ops.l2norm, "tensors"))(ops.l2norm.reference)
