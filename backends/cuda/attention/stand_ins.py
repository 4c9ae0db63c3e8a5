"""Stand-ins for torch's attention kernels on the simulator: plain torch on the CPU, with the same deviations.

They test the code around the kernels without a GPU (layouts, windows, packed sequences, dead rows, gradients), not the
kernels themselves. Each has the arguments and results of the torch operator that it is named after.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


def _by_query_head(x_GKD: Tensor, q_NQD: Tensor) -> Tensor:
    """Keys or values in float32, repeated for every head of queries."""
    return x_GKD.float().repeat_interleave(q_NQD.shape[-3] // x_GKD.shape[-3], -3)


def _weights(q_NQD: Tensor, k_GKD: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The softmax's weights (0 in rows without a key) and lse (-inf in those), in float32; any leading dimensions."""
    s = q_NQD.float() @ _by_query_head(k_GKD, q_NQD).transpose(-1, -2) * scale
    if bias is not None:
        s = s + bias.float()
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    e = torch.exp(s - torch.where(top == -math.inf, torch.zeros_like(top), top))
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0.0, torch.ones_like(total), total), (top + total.log()).squeeze(-1)


def _softmax(q_NQD: Tensor, k_GKD: Tensor, v_GKD: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse in float32; any leading dimensions, heads are dimension -3; lse of a row without a key is -inf."""
    weights, lse = _weights(q_NQD, k_GKD, bias, scale)
    return weights @ _by_query_head(v_GKD, q_NQD), lse


def _grads(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    """dq, dk and dv of `_softmax`, in the dtypes of q, k and v. By formulas, because autograd does not record what the
    implementation of an operator does, such as FlashAttention-3's."""
    weights, dout = _weights(q, k, bias, scale)[0], dout.float()
    dweights = dout @ _by_query_head(v, q).transpose(-1, -2)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * scale
    dk, dv = dscores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ dout
    dk, dv = (g.unflatten(-3, (k.shape[-3], -1)).sum(-3) for g in (dk, dv))
    return (dscores @ _by_query_head(k, q)).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _window(sq: int, skv: int, left: int, right: int, longest: int) -> Tensor:
    """flash-attn's window as a bias [sq, skv]; -1 is unbounded, as is a side of at least the longest key sequence.

    If only one side is bounded, the other is as long as that sequence, as in torch's set_params_fprop (flash_api.cpp).
    This hides keys if there are more queries than keys.
    """
    left, right = (-1 if n >= longest else n for n in (left, right))
    if max(left, right) >= 0:
        left, right = (longest if n < 0 else n for n in (left, right))
    i, j = torch.arange(sq)[:, None] + (skv - sq), torch.arange(skv)
    hidden = torch.zeros(sq, skv, dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    return torch.zeros(sq, skv).masked_fill(hidden, -math.inf)


def _sequences(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> list[tuple[Any, Any]]:
    """For every sequence the index into q and into k: a batch entry, or a slice of packed tokens."""
    if cu_q is None or cu_k is None:
        return [(b, b) for b in range(q.shape[0])]
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:])]


class Window(NamedTuple):
    """The arguments of `_window`."""

    left: int
    right: int
    longest: int


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, scale: float, window: Window
) -> tuple[Tensor, Tensor]:
    """out and lse: q [b, sq, n, d] or packed [tokens, n, d]; lse [b, n, sq] or [n, tokens], -inf without a key."""
    out = torch.empty_like(q)
    shape = (q.shape[0], q.shape[2], q.shape[1]) if cu_q is None else (q.shape[1], q.shape[0])
    lse = torch.empty(shape, dtype=torch.float32)
    for at_q, at_k in _sequences(q, k, cu_q, cu_k):
        qs, ks, vs = q[at_q].transpose(0, 1), k[at_k].transpose(0, 1), v[at_k].transpose(0, 1)
        y, part = _softmax(qs, ks, vs, _window(qs.shape[1], ks.shape[1], *window), scale)
        out[at_q] = y.transpose(0, 1).to(q.dtype)
        if cu_q is None:
            lse[at_q] = part
        else:
            lse[:, at_q] = part
    return out, lse


def differentiate(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    scale: float,
    window: Window,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; dout has the layout of q, see `attend`."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for at_q, at_k in _sequences(q, k, cu_q, cu_k):
        qs, ks, vs, d = (x.transpose(0, 1) for x in (q[at_q], k[at_k], v[at_k], dout[at_q]))
        gq, gk, gv = _grads(d, qs, ks, vs, _window(qs.shape[1], ks.shape[1], *window), scale)
        dq[at_q], dk[at_k], dv[at_k] = gq.transpose(0, 1), gk.transpose(0, 1), gv.transpose(0, 1)
    return dq, dk, dv


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """torch's _flash_attention_forward: q [b, sq, n, d], k and v [b, skv, g, d]; packed, [tokens, heads, d]."""
    # For one query per sequence, torch moves query heads into the batch. An empty sequence makes that reshape fail.
    heads = q.shape[-2]
    if cu_q is not None and max_q == 1 and heads > k.shape[1] and max(window_size_left, window_size_right) < 0:
        q.reshape(cu_q.numel() - 1, k.shape[1], heads // k.shape[1], q.shape[-1])
    window = Window(window_size_left, 0 if is_causal else window_size_right, max_k)
    out, lse = attend(q, k, v, cu_q, cu_k, scale, window)
    # The kernel writes +inf for a row without a visible key.
    lse, state = torch.where(lse == -math.inf, math.inf, lse), torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, state[:0], q.new_empty(0)


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's _flash_attention_backward: dq, dk and dv; dout and out have the layout of q, see `flash_forward`."""
    window = Window(window_size_left, 0 if is_causal else window_size_right, max_k)
    return differentiate(dout, q, k, v, cu_q, cu_k, scale, window)


def _corner(sq: int, skv: int, is_causal: bool) -> Tensor | None:
    """The bias [sq, skv] of torch's causal SDPA, aligned at the top left corner."""
    if not is_causal:
        return None
    return torch.zeros(sq, skv).masked_fill(torch.ones(sq, skv, dtype=torch.bool).triu(1), -math.inf)


def cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Any, ...]:
    """torch's cuDNN attention: q [b, n, sq, d], k and v [b, g, skv, d]; out has the layout of q."""
    out, lse = _softmax(q, k, v, _corner(q.shape[2], k.shape[2], is_causal), scale)
    state = torch.zeros((), dtype=torch.int64)
    return (
        torch.empty_like(q).copy_(out),
        lse[..., None],
        None,
        None,
        q.shape[2],
        k.shape[2],
        state,
        state,
        q.new_empty(0),
    )


_planned_strides: dict[Any, tuple[int, ...]] = {}
"""The strides of dout in each plan of cudnn's backward pass: those of the first call that needs the plan."""


def cudnn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    attn_bias: None,
    cu_q: None,
    cu_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """Its backward pass: dq, dk and dv from dout and out [b, n, sq, d].

    Raises RuntimeError where torch would read dout with the strides of an earlier one, and return wrong gradients.
    """
    plan = (is_causal, *((x.shape, x.stride(), x.dtype) for x in (q, k, v)))
    planned = _planned_strides.setdefault(plan, dout.stride())
    if planned != dout.stride():
        raise RuntimeError(f"cudnn's plan for these shapes reads dout with strides {planned}, it has {dout.stride()}")
    return _grads(dout, q, k, v, _corner(q.shape[2], k.shape[2], is_causal), scale)


def efficient_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """torch's memory-efficient attention: q [b, n, sq, d], k and v [b, n, skv, d], attn_bias [b, n, sq, skv]."""
    bias = attn_bias if attn_bias is not None else _corner(q.shape[2], k.shape[2], is_causal)
    out, lse = _softmax(q, k, v, bias, scale)
    # The kernel pads its statistics to a multiple of 32 queries.
    padded = torch.full((*lse.shape[:-1], -(-lse.shape[-1] // 32) * 32), math.inf)
    padded[..., : lse.shape[-1]] = lse
    state = torch.zeros((), dtype=torch.int64)
    return out.to(q.dtype), padded, state, state


def efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool,
    *,
    scale: float,
) -> tuple[Any, ...]:
    """Its backward pass: dq, dk and dv from dout and out [b, n, sq, d]."""
    bias = attn_bias if attn_bias is not None else _corner(q.shape[2], k.shape[2], is_causal)
    return (*_grads(dout, q, k, v, bias, scale), None)


def flex(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out, lse; hidden [b, n, sq, skv] is the block mask as a dense tensor, True = masked out."""
    bias = None if hidden is None else torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    out, lse = _softmax(q, k, v, bias, scale)
    return out.to(q.dtype), lse
