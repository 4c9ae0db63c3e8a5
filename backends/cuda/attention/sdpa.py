"""cuda/sdpa: torch's memory-efficient SDPA kernel: float32 too, and any mask or window as an additive bias.

The bias costs memory of sq x skv (times the mask's own batch and heads); causal squares need none. What the kernel
makes of a row whose bias is all -inf is not defined, so such rows get a bias of 0, and their output and gradient are
cleared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import launch
from . import stand_ins
from .common import Call, Request, fused, ordered_sums, readable, register
from .masks import dense_mask

ID = "cuda/sdpa"


def _refuse(request: Request) -> list[str]:
    call = request.call
    found = fused(call, "sdpa")
    if call.packed:
        found.append("packed sequences (sdpa takes dense batches)")
    lanes = 4 if request.dtype == torch.float32 else 8
    if call.d % lanes:
        found.append(f"head size {call.d} (sdpa takes multiples of {lanes} in {request.dtype})")
    if _biased(call, request.mask) and call.sq * _padded(call.skv) >= 2**32:
        found.append(
            f"a bias of {call.sq} queries and {call.skv} keys (sdpa multiplies a query's number by the bias's stride "
            "in 32 bits)"
        )
    return found


def _padded(skv: int) -> int:
    """The elements of a row of the bias in memory."""
    return -(-skv // 8) * 8


def _biased(call: Call, mask: Tensor | None) -> bool:
    """Whether the window or the mask takes a bias."""
    return mask is not None or not (call.unbounded or _corner(call, mask))


def _corner(call: Call, mask: Tensor | None) -> bool:
    """Whether the kernel's own causal mask (aligned at the top left) is the window."""
    return call.causal and call.sq == call.skv and mask is None


def _bias(call: Call, mask: Tensor | None, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(bias expanded to [b, n, sq, skv], rows that see nothing); the bias's rows start on 16-byte boundaries."""
    hidden = dense_mask(call, mask, q.device) if _biased(call, mask) else None
    if hidden is None:
        return None, None
    hidden = hidden[(None,) * (4 - hidden.ndim)]
    dead = hidden.expand(*hidden.shape[:3], call.skv).all(-1, keepdim=True)
    shape = (*hidden.shape[:2], call.sq, _padded(call.skv))
    bias = torch.zeros(shape, dtype=q.dtype, device=q.device)[..., : call.skv]
    bias.masked_fill_(hidden & ~dead, -math.inf)
    return bias.expand(q.shape[0], q.shape[1], -1, -1), dead


def _forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_q: None, cu_k: None
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    aten = torch.ops.aten._scaled_dot_product_efficient_attention
    kernel = stand_ins.efficient_forward if launch.simulated() else aten
    q = readable(q)
    k, v = (readable(x if call.group == 1 else x.repeat_interleave(call.group, dim=1)) for x in (k, v))
    bias, dead = _bias(call, mask, q)
    causal = _corner(call, mask)
    out, lse, seed, offset = kernel(q, k, v, bias, True, 0.0, causal, scale=call.scale)
    saved = (q, k, v, bias, out, lse, seed, offset, causal, dead)
    lse = lse[..., : call.sq]
    if dead is not None:
        out, lse = out.masked_fill(dead, 0.0), lse.masked_fill(dead.squeeze(-1), -math.inf)
    return out, lse, saved


def _backward(call: Call, saved: list[Any], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    aten = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    kernel = stand_ins.efficient_backward if launch.simulated() else aten
    *inputs, causal, dead = saved
    if dead is not None:
        dout = dout.masked_fill(dead, 0.0)
    wanted = [True, True, True, False]
    with ordered_sums():
        dq, dk, dv, _ = kernel(readable(dout), *inputs, 0.0, wanted, causal, scale=call.scale)
    if call.group > 1:
        dk, dv = (g.unflatten(1, (call.kv_heads, call.group)).float().sum(2).to(g.dtype) for g in (dk, dv))
    return dq, dk, dv


register(ID, refuse=_refuse, forward=_forward, backward=_backward)
