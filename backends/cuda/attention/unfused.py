"""cuda/unfused: products by torch, softmax and dropout by HAL's kernels. Accepts every call and needs sq x skv memory.

It gets the calls that torch's kernels refuse: dropout (HAL's bits), odd head sizes, negative windows. Scores and
probabilities are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Rng
from hal.backend_tools import AttentionSpec, draw_reasons

from ..random import drop
from ..softmax import softmax_backward, softmax_forward
from .common import Request, register
from .masks import dense_mask, packed_mask

ID = "cuda/unfused"


def _refuse(request: Request) -> Sequence[str]:
    rng: Rng | None = request.spec.rng
    return draw_reasons(rng, () if rng is None else rng.full_shape or ())


def _hidden(
    spec: AttentionSpec, mask: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor
) -> Tensor | None:
    """The mask for the softmax kernel, broadcastable to [b, n, sq, skv]; the kernel applies causal windows itself."""
    if cu_q is not None and cu_k is not None:
        return packed_mask(spec, cu_q, cu_k)
    return mask if spec.causal else dense_mask(spec, mask, q.device)


def _wide(x: Tensor, group: int) -> Tensor:
    """x [b, g, length, d] as float32 with one head per query head, [b, n, length, d]."""
    x = x.float()
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _dropped(spec: AttentionSpec, p: Tensor) -> Tensor:
    """p [b, n, sq, skv] after dropout; a packed draw has shape [n, tq, tk]."""
    if spec.rng is None or spec.dropout_p == 0.0:
        return p
    return drop(p[0], spec.dropout_p, spec.rng)[None] if spec.packed else drop(p, spec.dropout_p, spec.rng)


def _causal(spec: AttentionSpec) -> bool:
    return spec.causal and not spec.packed


def _forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """out [b, n, sq, d], lse [b, n, sq], and what the backward pass needs."""
    hidden = _hidden(spec, mask, cu_q, cu_k, q)
    s_BNQK = q.float() @ _wide(k, spec.group).transpose(-1, -2)
    p_BNQK, stats = softmax_forward(s_BNQK, hidden, spec.scale, _causal(spec))
    out = _dropped(spec, p_BNQK) @ _wide(v, spec.group)
    top, inverse = stats.view(2, *s_BNQK.shape[:-1])
    # A row without a visible key has inverse = 0; its log-sum-exp is -inf.
    lse = torch.where(inverse == 0.0, -torch.inf, top - inverse.log())
    return out.to(q.dtype), lse, (q, k, v, hidden, s_BNQK, stats)


def _backward(spec: AttentionSpec, saved: list[Any], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq [b, n, sq, d], dk and dv [b, g, skv, d]; probabilities are computed again from the scores."""
    q, k, v, hidden, s_BNQK, stats = saved
    do = dout.float()
    # P and its dropout mask are recomputed instead of saved, because both have sq x skv elements.
    p_BNQK, _ = softmax_forward(s_BNQK, hidden, spec.scale, _causal(spec))
    dv = _dropped(spec, p_BNQK).transpose(-1, -2) @ do
    dp_BNQK = _dropped(spec, do @ _wide(v, spec.group).transpose(-1, -2))
    ds_BNQK = softmax_backward(s_BNQK, dp_BNQK, hidden, stats, spec.scale, _causal(spec))
    dq = ds_BNQK @ _wide(k, spec.group)
    dk = ds_BNQK.transpose(-1, -2) @ q.float()
    if spec.group > 1:
        dk, dv = (g.unflatten(1, (spec.kv_heads, spec.group)).sum(2) for g in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


register(ID, refuse=_refuse, forward=_forward, backward=_backward)
