"""cuda/sdpa: torch's memory-efficient SDPA kernel, which supports float32, and any mask or window as an additive bias.

The bias takes sq x skv elements (times the batch and heads of the mask); causal square masks need no bias. The kernel's
result for a row whose bias is all -inf is undefined, so such rows get a bias of 0, and their output and gradient are
zeroed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal.backend_tools import AttentionSpec

from .. import launch
from . import stand_ins
from .common import Given, Request, fused, ordered_sums, readable, register
from .masks import dense_mask

ID = "cuda/sdpa"


def _refuse(request: Request) -> list[str]:
    spec = request.spec
    refusals = fused(spec, "sdpa")
    if spec.packed:
        refusals.append("packed sequences (sdpa takes dense batches)")
    lanes = 4 if request.dtype == torch.float32 else 8
    for size in {spec.d: None, spec.dv: None}:
        if size % lanes:
            refusals.append(f"head size {size} (sdpa takes multiples of {lanes} in {request.dtype})")
    if _biased(spec, request.mask) and spec.sq * _padded(spec.skv) >= 2**32:
        refusals.append(
            f"a bias of {spec.sq} queries and {spec.skv} keys (sdpa multiplies the query's index by the bias's stride "
            "in 32 bits)"
        )
    return refusals


def _padded(skv: int) -> int:
    """The row stride of the bias, in elements."""
    return -(-skv // 8) * 8


def _biased(spec: AttentionSpec, mask: Tensor | None) -> bool:
    """Whether the window or the mask needs a bias."""
    return mask is not None or not (spec.unbounded or _corner(spec, mask))


def _corner(spec: AttentionSpec, mask: Tensor | None) -> bool:
    """Whether the window equals the kernel's own causal mask, which is aligned at the top left."""
    return spec.causal and spec.sq == spec.skv and mask is None


def _bias(spec: AttentionSpec, mask: Tensor | None, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(bias expanded to [b, n, sq, skv], rows without a visible key); rows of the bias start on 16-byte boundaries."""
    hidden = dense_mask(spec, mask, q.device) if _biased(spec, mask) else None
    if hidden is None:
        return None, None
    hidden = hidden[(None,) * (4 - hidden.ndim)]
    dead = hidden.expand(*hidden.shape[:3], spec.skv).all(-1, keepdim=True)
    shape = (*hidden.shape[:2], spec.sq, _padded(spec.skv))
    # The kernel needs rows on 16-byte boundaries, so they are padded; the view leaves the padding out.
    bias = torch.zeros(shape, dtype=q.dtype, device=q.device)[..., : spec.skv]
    bias.masked_fill_(hidden & ~dead, -math.inf)
    return bias.expand(q.shape[0], q.shape[1], -1, -1), dead


def _by_group(x: Tensor, heads: int) -> Tensor:
    """x [b, n, ...] as [b * g, n / g, ...] for `heads` = g; a view if the strides allow it. n may be 1 (broadcast)."""
    if x.shape[1] == 1:
        return x.expand(x.shape[0], heads, *x.shape[2:]).reshape(-1, 1, *x.shape[2:])
    return x.unflatten(1, (heads, -1)).flatten(0, 1)


def _shared(x: Tensor, group: int) -> Tensor:
    """k or v [b, g, skv, d] as [b * g, group, skv, d], in which the heads of a group share memory."""
    return readable(x.flatten(0, 1))[:, None].expand(-1, group, -1, -1)


def _forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: Given
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """out [b, n, sq, d], lse [b, n, sq], and what the backward pass needs.

    The kernel has no GQA, but it reads heads by their stride: with a batch of b x g and the heads of one group, the
    heads' stride of k and v is 0.
    """
    aten = torch.ops.aten._scaled_dot_product_efficient_attention
    kernel = stand_ins.efficient_forward if launch.simulated() else aten
    g = spec.kv_heads
    bias, dead = _bias(spec, given.mask, q)
    if spec.group > 1:
        q, k, v = readable(_by_group(q, g)), _shared(k, spec.group), _shared(v, spec.group)
        bias = bias if bias is None else _by_group(bias, g)
        dead = dead if dead is None else _by_group(dead.expand(spec.batch, *dead.shape[1:]), g)
    else:
        q, k, v = (readable(x) for x in (q, k, v))
    causal = _corner(spec, given.mask)
    out, lse, seed, offset = kernel(q, k, v, bias, True, 0.0, causal, scale=spec.scale)
    saved = (q, k, v, bias, out, lse, seed, offset, causal, dead)
    lse = lse[..., : spec.sq]
    if dead is not None:
        out = out.masked_fill(dead, 0.0)
        lse = lse.masked_fill(dead.squeeze(-1), -math.inf) if given.lse else lse
    shape = (spec.batch, spec.heads, spec.sq)
    return out.reshape(*shape, spec.dv), lse.reshape(shape), saved


def _backward(spec: AttentionSpec, saved: list[Any], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq [b, n, sq, d], dk and dv [b, g, skv, d]; the gradients of a group's heads are summed in float32."""
    aten = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    kernel = stand_ins.efficient_backward if launch.simulated() else aten
    *inputs, causal, dead = saved
    if spec.group > 1:
        dout = _by_group(dout, spec.kv_heads)
    if dead is not None:
        dout = dout.masked_fill(dead, 0.0)
    gradients = [True, True, True, False]  # of q, k, v, but not of the bias
    with ordered_sums():
        dq, dk, dv, _ = kernel(readable(dout), *inputs, 0.0, gradients, causal, scale=spec.scale)
    if spec.group > 1:
        dq = dq.unflatten(0, (spec.batch, spec.kv_heads)).flatten(1, 2)
        dk, dv = (x.float().sum(1).to(x.dtype).unflatten(0, (spec.batch, spec.kv_heads)) for x in (dk, dv))
    return dq, dk, dv


register(ID, refuse=_refuse, forward=_forward, backward=_backward, takes=("dv",))
