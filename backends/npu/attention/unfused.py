"""flash_attention by the op's reference on torch_npu's operators, which forms the matrix of scores.

It takes the calls that the fused operator refuses: dropout of packed sequences, and sizes beyond its limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hal import ops
from hal.backend_tools import AttentionSpec, attention_spec, with_signature_of

from ..device import Npu
from ..tensors import reasons


@with_signature_of(ops.flash_attention, spec=attention_spec)
def _why_not(spec: AttentionSpec, q: Tensor) -> Sequence[str]:
    if not q.numel() and spec.batch == spec.heads == 1:
        return ["one head without queries (torch_npu's matmul cannot differentiate a product without rows)"]
    return reasons(q)


Npu.impl(ops.flash_attention, id="npu/torch", why_not=_why_not)(ops.flash_attention.reference)
