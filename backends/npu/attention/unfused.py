"""flash_attention by the op's reference on torch_npu's operators, which forms the matrix of scores.

It takes the calls that the others refuse, except those with dropout: softcap, ALiBi with unequal numbers of queries and
keys, and sizes beyond the fused operator's limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal import Call, ops
from hal.backend_tools import attention_spec

from ..device import Npu
from ..tensors import reasons


def _why_not(call: Call) -> Sequence[str]:
    spec = attention_spec(call)
    if not call.q.numel() and spec.batch == spec.heads == 1:
        return ["one head without queries (torch_npu's matmul cannot differentiate a product without rows)"]
    refusals = reasons(call.q)
    if spec.dropout_p > 0.0:
        refusals.append("dropout (a draw for each score, which takes more memory than all else in a model)")
    return refusals


Npu.impl(ops.flash_attention, id="npu/torch", why_not=_why_not, version=2)(ops.flash_attention.reference)
