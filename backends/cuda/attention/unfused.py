"""cuda/unfused: products by torch, softmax and dropout by HAL's kernels. Accepts every call and needs sq x skv memory.

It runs the calls that torch's kernels refuse: dropout (HAL's bits), odd head sizes, negative windows, softcap, ALiBi,
bias and sinks. Scores and probabilities are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Rng, ops
from hal.backend_tools import EXTRAS, AttentionSpec, draw_reasons

from ..random import drop
from ..softmax import softmax_backward, softmax_forward
from .common import Given, Request, register
from .masks import dense_mask, packed_mask, packed_positions

ID = "cuda/unfused"


def _refuse(request: Request) -> Sequence[str]:
    rng: Rng | None = request.spec.rng
    return draw_reasons(rng, () if rng is None else rng.full_shape or ())


def _hidden(spec: AttentionSpec, given: Given, q: Tensor) -> Tensor | None:
    """The mask for the softmax kernel, broadcastable to [b, n, sq, skv]; the kernel applies causal windows itself."""
    if given.cu_q is not None and given.cu_k is not None:
        return packed_mask(spec, given.cu_q, given.cu_k)
    return given.mask if spec.causal else dense_mask(spec, given.mask, q.device)


def _alibi(spec: AttentionSpec, slopes: Tensor, given: Given) -> Tensor:
    """ALiBi's bias, broadcastable to [b, n, sq, skv]."""
    if given.cu_q is None or given.cu_k is None:
        return ops.alibi_bias(slopes, spec.sq, spec.skv, 0 if spec.top_left else spec.skv - spec.sq)
    owner, i, _, j = packed_positions(spec, given.cu_q, given.cu_k)
    of_query = slopes[:, None] if slopes.ndim == 1 else slopes[owner].T  # [n, 1 or tq]
    return -of_query[..., None] * (i[:, None] - j).abs()


def _scores(spec: AttentionSpec, q: Tensor, k: Tensor, given: Given) -> tuple[Tensor, float, Tensor | None]:
    """The scores [b, n, sq, skv], the scale that the softmax has to apply, and the derivative of the softcap."""
    s_BNQK, cap = q.float() @ _wide(k, spec.group).transpose(-1, -2), None
    if not _CHANGED.intersection(spec.extras):
        return s_BNQK, spec.scale, None
    s_BNQK = s_BNQK * spec.scale
    if spec.softcap is not None:
        t = torch.tanh(s_BNQK / spec.softcap)
        s_BNQK, cap = spec.softcap * t, 1.0 - t * t
    if given.slopes is not None:
        s_BNQK = s_BNQK + _alibi(spec, given.slopes, given)
    if given.bias is not None:
        s_BNQK = s_BNQK + given.bias.float()
    return s_BNQK, 1.0, cap


_CHANGED = frozenset(("softcap", "alibi_slopes", "bias"))
"""The extras that change scores before the softmax."""


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
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: Given
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """out [b, n, sq, e], lse [b, n, sq], and what the backward pass needs."""
    hidden = _hidden(spec, given, q)
    s_BNQK, scale, cap = _scores(spec, q, k, given)
    p_BNQK, stats = softmax_forward(s_BNQK, hidden, scale, _causal(spec))
    top, inverse = stats.view(2, *s_BNQK.shape[:-1])
    # A row without a visible key has inverse = 0; its log-sum-exp is -inf.
    lse, part = torch.where(inverse == 0.0, -torch.inf, top - inverse.log()), None
    if given.sinks is not None:
        total = torch.logaddexp(lse, given.sinks.float()[:, None])
        # The probability that is left to the keys.
        part = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))[..., None]
        lse, p_BNQK = total, p_BNQK * part
    out = _dropped(spec, p_BNQK) @ _wide(v, spec.group)
    saved = (q, k, v, given.bias, given.sinks, hidden, s_BNQK, scale, cap, stats, part)
    return out.to(q.dtype), lse, saved


def _backward(spec: AttentionSpec, saved: list[Any], dout: Tensor) -> tuple[Tensor | None, ...]:
    """dq [b, n, sq, d], dk [b, g, skv, d], dv [b, g, skv, e], dbias, dsinks; probabilities are computed again from the
    scores."""
    q, k, v, bias, sinks, hidden, s_BNQK, scale, cap, stats, part = saved
    do, dbias, dsinks = dout.float(), None, None
    # P and its dropout mask are recomputed instead of saved, because both have sq x skv elements.
    p_BNQK, _ = softmax_forward(s_BNQK, hidden, scale, _causal(spec))
    dp_BNQK = _dropped(spec, do @ _wide(v, spec.group).transpose(-1, -2))
    ds_BNQK = softmax_backward(s_BNQK, dp_BNQK, hidden, stats, scale, _causal(spec))
    if sinks is not None:
        # With r = part, the probabilities are r P, and dS = r P (dP - r delta) = r (P (dP - delta) + (1 - r) delta P).
        delta = (p_BNQK * dp_BNQK).sum(-1, keepdim=True)
        ds_BNQK = part * (ds_BNQK + scale * (1.0 - part) * delta * p_BNQK)
        dsinks = -((1.0 - part) * part * delta).sum((0, 2, 3)).to(sinks.dtype)
        p_BNQK = p_BNQK * part
    dv = _dropped(spec, p_BNQK).transpose(-1, -2) @ do
    if bias is not None:
        dbias = ds_BNQK.sum_to_size(bias.shape).to(bias.dtype)
    if _CHANGED.intersection(spec.extras):
        ds_BNQK = ds_BNQK * spec.scale if cap is None else ds_BNQK * cap * spec.scale
    dq = ds_BNQK @ _wide(k, spec.group)
    dk = ds_BNQK.transpose(-1, -2) @ q.float()
    if spec.group > 1:
        dk, dv = (g.unflatten(1, (spec.kv_heads, spec.group)).sum(2) for g in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias, dsinks


register(ID, refuse=_refuse, forward=_forward, backward=_backward, takes=EXTRAS)
