"""flash_attention as megatron_npu runs it by default (`high_precision` not set); only used if pinned.

`--pin flash_attention=npu/fusion_attention_low_precision` passes inner_precise=1, the library's default in CANN 7.0,
which documents 0 as high precision; later releases document no difference. All other calls pass 0, or 2 where rows may
have no visible key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hal import Call, ops
from hal.backend_tools import AttentionSpec, attention_spec, with_signature_of

from .fusion import added_refusals, beyond_limits, fusion_impl, run_dense
from .fusion_call import plan


def _why_not(call: Call) -> Sequence[str]:
    spec = attention_spec(call)
    refusals = beyond_limits(spec, call.q, "bias") + added_refusals(call, spec)
    if spec.dropout_p > 0.0:
        refusals.append("dropout")
    if spec.packed:
        return [*refusals, "packed sequences (npu/fusion_attention takes them)"]
    if plan(spec.sq, spec.skv, spec.pre, spec.next, call.mask is not None).dead_rows:
        refusals.append("rows that may see nothing (only inner_precise=2 makes them 0)")
    return refusals


@fusion_impl(id="npu/fusion_attention_low_precision", why_not=_why_not)
@with_signature_of(ops.flash_attention, spec=attention_spec)
def flash_attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    return_lse: bool,
    bias: Tensor | None,
) -> tuple[Any, tuple[Any, ...]]:
    return run_dense(spec, q, k, v, mask, return_lse, bias, low_precision=True)
