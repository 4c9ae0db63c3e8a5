"""flash_attention on npu_fusion_attention (see fusion_call.py), dense and packed.

Packed sequences (TND) are one library call if it accepts all of them, otherwise one call per sequence. The library
drops probabilities by its own random numbers only, so dropout is an implementation of its own
(npu/fusion_attention_vendor_rng, see vendor_rng.py), which exists by request only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal import Call, ops
from hal.backend_tools import AttentionSpec, CuSeqlens, attention_spec, packed_starts, with_signature_of

from .. import vendor_rng
from ..constraints import CONSTRAINTS
from ..device import Npu
from ..tensors import reasons
from .fusion_call import (
    BIAS,
    SLOPES,
    FusionCall,
    VendorDropout,
    accepts,
    aligned,
    full_bias,
    full_mask,
    lse_of,
    orders_statistics,
    plan,
    plan_packed,
    triangle,
)

DROPOUT = (
    "dropout: npu_fusion_attention drops by the vendor's random numbers only. Request these with --rng vendor "
    "(rng='vendor' in hal.use, HAL_NPU_RNG=vendor for other programs), or let the model form the scores and drop them "
    "by HAL's numbers (--no-flash-attn)"
)
_SIZES = {
    "heads": "attention.heads",
    "channels per head": "attention.head_size",
    "batch entries": "attention.batch",
    "tokens": "attention.tokens",
    "packed tokens": "attention.packed_tokens",
}


def beyond_limits(spec: AttentionSpec, q: Tensor, *takes: str) -> list[str]:
    """Reasons why npu_fusion_attention refuses tensors of this dtype and these sizes; empty if it accepts them.

    takes: see AttentionSpec.refusals, in addition to heads of two sizes.
    """
    tokens = max(spec.sq, spec.skv)
    sizes = {"heads": spec.heads, "channels per head": spec.d, "batch entries": spec.batch}
    sizes["packed tokens" if spec.packed else "tokens"] = tokens
    refusals = [*reasons(q), *spec.refusals("npu_fusion_attention", ("dv", *takes))]
    if spec.dv > spec.d:
        refusals.append(
            f"heads of {spec.dv} channels in v and {spec.d} in k (npu_fusion_attention takes at most as many)"
        )
    return refusals + [r for what, n in sizes.items() for r in CONSTRAINTS[_SIZES[what]].refusal(what, n)]


def added_refusals(call: Call, spec: AttentionSpec) -> list[str]:
    """Reasons why a bias, ALiBi's slopes or sinks cannot be passed to npu_fusion_attention (_v2)."""
    refusals = []
    if call.bias is not None and call.alibi_slopes is not None:
        refusals.append("a bias and alibi_slopes (npu_fusion_attention_v2 takes one of them)")
    if call.alibi_slopes is not None and spec.packed:
        refusals.append(
            "alibi_slopes of packed sequences (npu_fusion_attention_v2 has no statistics in the order of tokens)"
        )
    elif call.alibi_slopes is not None and spec.sq != spec.skv:
        refusals.append(
            f"alibi_slopes with {spec.sq} queries and {spec.skv} keys (npu_fusion_attention_v2 takes equal numbers)"
        )
    if (
        call.bias is not None
        and call.q.dtype != torch.float32
        and tuple(call.bias.shape[-3:]) != (spec.heads, spec.sq, spec.skv)
    ):
        refusals.append(
            f"a bias of shape {list(call.bias.shape)} in {call.q.dtype} (npu_fusion_attention_grad rounds the gradient "
            "of each score to 16 bits, before a sum over heads, queries or keys)"
        )
    if call.sinks is not None and call.return_lse:
        refusals.append("sinks with return_lse (the vendor does not document whether its statistics include the sink)")
    return refusals + [
        f"{what} ({operator} of this torch_npu has no argument {argument})"
        for what, operator, argument in _newer_arguments(call, spec)
        if hasattr(torch.ops.npu, operator) and not accepts(operator, argument)
    ]


def _newer_arguments(call: Call, spec: AttentionSpec) -> Iterator[tuple[str, str, str]]:
    """(what the call has, operator, argument) of arguments that older releases of torch_npu lack."""
    added = call.bias is not None or call.alibi_slopes is not None
    operator = "npu_fusion_attention_v2" if added else "npu_fusion_attention"
    if call.sinks is not None:
        yield "sinks", operator, "sink"
    if added and spec.dropout_p > 0.0:
        yield "dropout with a bias or alibi_slopes", operator, "dropout_mask"


def _refusals(call: Call, spec: AttentionSpec) -> list[str]:
    refusals = beyond_limits(spec, call.q, "bias", "alibi_slopes", "sinks", "top_left") + added_refusals(call, spec)
    if call.cu_seqlens_q is not None:
        refusals += CONSTRAINTS["attention.packed_sequences"].refusal("packed sequences", len(call.cu_seqlens_q) - 1)
    return refusals


def _why_not(call: Call) -> Sequence[str]:
    spec = attention_spec(call)
    refusals = _refusals(call, spec)
    if spec.dropout_p > 0.0:
        refusals.append(DROPOUT)
    return refusals


def _why_not_vendor_rng(call: Call) -> Sequence[str]:
    spec = attention_spec(call)
    refusals = _refusals(call, spec)
    if spec.dropout_p == 0.0:
        refusals.append("no dropout (npu/fusion_attention takes it)")
    return refusals


def backward(
    residuals: tuple[Any, ...], dy: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk and dv in the layout of q, k and v, and the gradients of bias and sinks, from dy like out; the gradient of
    lse is not used."""
    q, k, v, mask, out, top, total, calls, pse, sinks_taken, bias, sinks = residuals
    dbias, dsinks = (None if x is None else torch.zeros_like(x) for x in (bias, sinks))
    if calls is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dbias, dsinks
    if isinstance(calls, FusionCall):
        # The library has no layout SBND; as SBH, [s, b, n, d] is [s, b, n d], which is a view.
        shapes = q.shape, k.shape, v.shape
        if calls.layout == "SBH":
            q, k, v, out, dy = (x.reshape(*x.shape[:2], -1) for x in (q, k, v, out, dy))
        dq, dk, dv, dpse, dsink = calls.backward(q, k, v, mask, out, top, total, dy, pse, sinks_taken)
        if bias is not None:
            dbias = dpse.float().sum_to_size(bias.shape).to(bias.dtype)
        if sinks is not None:
            dsinks = dsink.to(sinks.dtype)
        return dq.view(shapes[0]), dk.view(shapes[1]), dv.view(shapes[2]), dbias, dsinks
    dq, dk, dv, dsink = _one_by_one_bwd(q, k, v, out, top, total, calls, dy, sinks_taken)
    return dq, dk, dv, None, None if sinks is None else dsink.to(sinks.dtype)


_ROUNDED_OUTPUT = "npu_fusion_attention_grad forms its row sums from the 16-bit output, not from what was rounded"
WAIVERS = {torch.float16: (2.0, _ROUNDED_OUTPUT), torch.bfloat16: (2.0, _ROUNDED_OUTPUT)}


fusion_impl = partial(Npu.impl, ops.flash_attention, bwd=backward, waivers=WAIVERS, version=2)
"""Registers a function that calls npu_fusion_attention and returns the residuals that `backward` takes."""


class Added(NamedTuple):
    """What is added to the scores, as the library takes it: pse by FusionCall.pse_type, and sinks in float32."""

    pse: Tensor | None = None
    sinks: Tensor | None = None


@with_signature_of(ops.flash_attention, spec=attention_spec, cu_seqlens=packed_starts)
def flash_attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: CuSeqlens,
    return_lse: bool,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Any, tuple[Any, ...]]:
    if cu_seqlens is None:
        return run_dense(spec, q, k, v, mask, return_lse, bias, alibi_slopes, sinks)
    # The library takes the ends of sequences, without the leading 0.
    q_ends, k_ends = (starts[1:] for starts in cu_seqlens)
    return _packed(spec, q.contiguous(), k.contiguous(), v.contiguous(), q_ends, k_ends, return_lse, sinks)


fusion_impl(id="npu/fusion_attention", why_not=_why_not)(flash_attention)
fusion_impl(id=f"npu/fusion_attention_{vendor_rng.SUFFIX}", why_not=_why_not_vendor_rng)(flash_attention)


def _dropout(spec: AttentionSpec, count: int, *sequence: int) -> VendorDropout | None:
    """The dropout of a library call with `count` probabilities; sequence: its number, if each has a call of its own."""
    if spec.rng is None:
        return None
    rng = spec.rng.fork("sequence", *sequence) if sequence else spec.rng
    return VendorDropout(spec.dropout_p, *vendor_rng.seed_and_offset(rng), count)


def run_dense(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    return_lse: bool,
    bias: Tensor | None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    low_precision: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """The result of a call with a dense layout, and the residuals for `backward`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    call, atten_mask = dense_call(spec, q, mask)
    if call is None:
        out, lse = without_keys(spec, q)
        return (out, lse) if return_lse else out, (q, k, v, None, out, out, out, None, *Added(), bias, sinks)
    dropout = _dropout(spec, spec.batch * spec.heads * spec.sq * spec.skv)
    call, added = replace(call, low_precision=low_precision, dropout=dropout), Added(sinks=_as_library_takes(sinks))
    if bias is not None:
        call = replace(call, pse_type=BIAS)
        added = added._replace(pse=full_bias(bias, spec.batch, spec.heads, spec.sq, spec.skv))
    elif alibi_slopes is not None:
        call, added = replace(call, pse_type=SLOPES), added._replace(pse=_as_library_takes(alibi_slopes))
    flat_q, flat_k, flat_v = flat(spec.layout, q, k, v)
    out, top, total = call.forward(flat_q, flat_k, flat_v, atten_mask, *added)
    out = out.view(out_shape(spec, q))
    residuals = (q, k, v, atten_mask, out, top, total, call, *added, bias, sinks)
    return (out, lse_of(top, total)) if return_lse else out, residuals


def _as_library_takes(x: Tensor | None) -> Tensor | None:
    """Slopes or sinks in float32."""
    return None if x is None else x.detach().float().contiguous()


def dense_call(spec: AttentionSpec, q: Tensor, mask: Tensor | None) -> tuple[FusionCall | None, Tensor | None]:
    """The library call for a dense layout and its atten_mask; (None, None) without queries or keys."""
    sq, sk = spec.sq, spec.skv
    if not q.numel() or not sk:
        return None, None
    chosen = plan(sq, sk, spec.pre, spec.next, mask is not None)
    atten_mask = None
    if chosen.mask == "triangle":
        atten_mask = triangle(q.device)
    elif chosen.mask == "full":
        band = ops.band_mask(sq, sk, spec.pre, spec.next, q.device)
        atten_mask = full_mask(mask, band, spec.batch, spec.heads, sq, sk)
    return FusionCall("SBH" if spec.layout == "SBND" else spec.layout, spec.heads, spec.scale, chosen), atten_mask


def flat(layout: str, *tensors: Tensor) -> Sequence[Tensor]:
    """The tensors in a layout that the library supports: SBND as SBH."""
    return [x.reshape(*x.shape[:2], -1) for x in tensors] if layout == "SBND" else tensors


def out_shape(spec: AttentionSpec, q: Tensor) -> tuple[int, ...]:
    """The shape of the output: that of q with the head size of v."""
    return (*q.shape[:-1], spec.dv * (spec.heads if spec.layout in ("SBH", "BSH") else 1))


def without_keys(spec: AttentionSpec, q: Tensor) -> tuple[Tensor, Tensor]:
    """out (zeros) and lse [b, n, sq] (-inf) of a call without queries or keys."""
    return q.new_zeros(out_shape(spec, q)), q.new_full(
        (spec.batch, spec.heads, spec.sq), -math.inf, dtype=torch.float32
    )


def _packed(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: list[int],
    k_ends: list[int],
    return_lse: bool,
    sinks: Tensor | None,
) -> tuple[Any, tuple[Any, ...]]:
    """All sequences in one call if the library accepts that, otherwise one call per sequence.

    q [tq, n, d]; k, v [tk, g, d].
    """
    lengths = [[b - a for a, b in zip([0, *ends], ends)] for ends in (q_ends, k_ends)]
    one_call = q.numel() and orders_statistics()
    together = plan_packed(*lengths, spec.pre, spec.next, spec.top_left) if one_call else None
    calls: Any = None
    atten_mask, added = None, Added(sinks=_as_library_takes(sinks))
    out, top = q.new_zeros(out_shape(spec, q)), q.new_zeros((*q.shape[:2], 8), dtype=torch.float32)
    total = top
    if together is not None:
        dropout = _dropout(spec, spec.heads * sum(a * b for a, b in zip(*lengths)))
        calls = FusionCall("TND", spec.heads, spec.scale, together, tuple(q_ends), tuple(k_ends), dropout=dropout)
        atten_mask = None if together.mask == "none" else triangle(q.device)
        out, top, total = calls.forward(q, k, v, atten_mask, *added)
    elif q.numel():
        calls = _Sequences(tuple(q_ends), tuple(k_ends), spec)
        # The library's statistics of rows without a key, for the sequences that are skipped below.
        top, total = torch.full_like(top, -torch.finfo(torch.float32).max), torch.ones_like(top)
        for rows, columns, call, mask in calls.each(q.device):
            one = call.forward(q[None, rows], k[None, columns], v[None, columns], mask, *added)
            out[rows] = one[0][0]
            # From [1, n, s, 8] to the layout of packed calls, [s, n, 8].
            top[rows], total[rows] = (x[0].transpose(0, 1) for x in one[1:])
    result = (out, lse_of(top, total).T) if return_lse else out
    return result, (q, k, v, atten_mask, out, top, total, calls, *added, None, sinks)


@dataclass(frozen=True)
class _Sequences:
    """Packed sequences that are computed separately, each as a batch of one."""

    q_ends: tuple[int, ...]
    k_ends: tuple[int, ...]
    spec: AttentionSpec

    def each(self, device: torch.device) -> Iterator[tuple[slice, slice, FusionCall, Tensor | None]]:
        """(slice of query tokens, slice of key tokens, call, atten_mask) of each sequence that has both."""
        bounds = zip((0, *self.q_ends), self.q_ends, (0, *self.k_ends), self.k_ends)
        for number, (q0, q1, k0, k1) in enumerate(bounds):
            sq, sk = q1 - q0, k1 - k0
            if not sq or not sk:
                continue
            window = self.spec.pre, self.spec.next
            pre, next = aligned(*window, sq, sk) if self.spec.top_left else window
            chosen = plan(sq, sk, pre, next, False)
            mask = triangle(device) if chosen.mask == "triangle" else None
            if chosen.mask == "full":
                mask = full_mask(None, ops.band_mask(sq, sk, pre, next, device), 1, self.spec.heads, sq, sk)
            dropout = _dropout(self.spec, self.spec.heads * sq * sk, number)
            call = FusionCall("BSND", self.spec.heads, self.spec.scale, chosen, dropout=dropout)
            yield slice(q0, q1), slice(k0, k1), call, mask


def _one_by_one_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    top: Tensor,
    total: Tensor,
    sequences: _Sequences,
    dy: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq [tq, n, d], dk and dv [tk, g, d], dsinks [n] in float32; sequences without queries or keys have gradient 0."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dsinks = q.new_zeros(q.shape[1], dtype=torch.float32)
    for rows, columns, call, mask in sequences.each(q.device):
        stats = [x[rows].transpose(0, 1)[None].contiguous() for x in (top, total)]
        parts = q[None, rows], k[None, columns], v[None, columns], mask, out[None, rows], *stats, dy[None, rows]
        grads = call.backward(*parts, sinks=sinks)
        dq[rows], dk[columns], dv[columns] = (g[0] for g in grads[:3])
        if sinks is not None:
            dsinks += grads[4]
    return dq, dk, dv, dsinks
