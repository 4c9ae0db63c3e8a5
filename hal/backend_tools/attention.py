"""Describes calls of ops.flash_attention by sizes and strides, independent of the layout, for `with_signature_of`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from hal import ops
from hal.core.call import Call
from hal.core.host_values import host_value
from hal.core.op import require
from hal.rng import Rng

UNBOUNDED = 1 << 40
"""Replaces None in pre_tokens and next_tokens. It exceeds every sequence length and is far from 64-bit overflow."""


class AttentionSpec(NamedTuple):
    """The plain values of one call, resolved: head counts from shapes, the default scale, no dropout without an Rng.

    sq, skv: lengths of queries and keys, token counts when packed (batch is then 1). d, dv: head size of q and k, and
    of v and the output. rng is None if and only if dropout_p is 0.
    pre, next: the window; of a dense call always aligned at the bottom right, also if the call is aligned at the top
    left, and clamped to sq + skv tokens, beyond which nothing changes. top_left: true only where it affects a kernel,
    which is for packed sequences with a window and for ALiBi.
    extras: which of EXTRAS the call uses; see `refusals`. Hashable, for what is cached per kind of call.
    """

    layout: str
    batch: int
    heads: int
    kv_heads: int
    sq: int
    skv: int
    d: int
    pre: int | None
    next: int | None
    scale: float
    dropout_p: float
    rng: Rng | None
    dv: int
    softcap: float | None
    top_left: bool
    extras: tuple[str, ...]

    def refusals(self, kernel: str, takes: Collection[str] = ()) -> list[str]:
        """Why `kernel` refuses the call, if the call uses extras other than `takes`: one reason for each."""
        return [f"{_EXTRAS[name].format(spec=self)} ({kernel} has none)" for name in self.extras if name not in takes]

    @property
    def packed(self) -> bool:
        """Whether sequences are packed one after the other (TND)."""
        return self.layout == "TND"

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def causal(self) -> bool:
        """Whether the window is exactly causal: key j is visible to query i if and only if j <= i + skv - sq."""
        return self.pre is None and self.next == 0

    @property
    def unbounded(self) -> bool:
        """Whether the window hides nothing."""
        return self.pre is None and self.next is None


_EXTRAS = {
    "dv": "heads of {spec.dv} channels in v and {spec.d} in k",
    "softcap": "softcap={spec.softcap:g}",
    "alibi_slopes": "alibi_slopes",
    "bias": "a bias",
    "sinks": "sinks",
    "top_left": "top_left of packed sequences or of ALiBi",
}
EXTRAS = tuple(_EXTRAS)
"""What a call of ops.flash_attention may require beyond masks, windows and dropout: `AttentionSpec.extras`."""


def attention_spec(call: Call) -> AttentionSpec:
    """The spec of a call of ops.flash_attention."""
    layout, rng = call.layout, call.rng
    batch, heads, sq, d = ops.layouts.sizes(call.q, layout, call.num_heads)
    kv_heads = call.num_kv_heads or heads if layout in ("SBH", "BSH") else call.k.shape[layout.index("N")]
    skv = call.k.shape[layout.index("T" if layout == "TND" else "S")]
    scale = 1.0 / math.sqrt(d) if call.scale is None else float(call.scale)
    # Normalize "no dropout" so that callers need to test only one of the two, and equal calls have equal specs.
    dropout_p = 0.0 if rng is None else call.dropout_p
    pre, next, softcap, top_left = call.pre_tokens, call.next_tokens, call.softcap, call.top_left
    if top_left and layout != "TND":
        pre, next = None if pre is None else pre + skv - sq, None if next is None else next - (skv - sq)
    # Edges are clamped, which changes nothing for these lengths, so that they fit into a kernel's 32-bit integers.
    pre, next = (None if edge is None else max(-(sq + skv), min(edge, sq + skv)) for edge in (pre, next))
    slopes = call.alibi_slopes is not None
    top_left = top_left and (slopes or (layout == "TND" and not (pre is None and next is None)))
    dv = call.v.shape[-1] // (kv_heads if layout in ("SBH", "BSH") else 1)
    used = (dv != d, softcap is not None, slopes, call.bias is not None, call.sinks is not None, top_left)
    return AttentionSpec(
        layout,
        batch,
        heads,
        kv_heads,
        sq,
        skv,
        d,
        pre,
        next,
        scale,
        dropout_p,
        rng if dropout_p else None,
        dv,
        softcap,
        top_left,
        tuple(name for name, uses in zip(EXTRAS, used) if uses) if any(used) else (),
    )


def attention_strides(layout: str, strides: Sequence[int], d: int) -> tuple[int, int, int]:
    """(batch, token, head) strides of a tensor of `layout` with these strides and head size d; batch 0 for TND."""
    if layout == "TND":
        return 0, strides[0], strides[1]
    head = d if layout in ("SBH", "BSH") else strides[layout.index("N")]
    return strides[layout.index("B")], strides[layout.index("S")], head


def bounded(tokens: int | None) -> int:
    """One side of a window, clamped so that a kernel can add to it without overflow; None becomes UNBOUNDED."""
    return UNBOUNDED if tokens is None else max(-UNBOUNDED, min(tokens, UNBOUNDED))


CuSeqlens = tuple[list[int], list[int]] | None
"""Start offsets of the query and of the key sequences, as returned by `packed_starts`; None for a dense call."""


def packed_starts(call: Call) -> CuSeqlens:
    """cu_seqlens of a packed call as lists, for kernels launched per sequence.

    Reading a tensor waits for its device, so the list is read once per tensor and version: the layers of a model, and
    its recomputed forward passes, share one pair. A change that torch does not see (through another process, or a raw
    pointer) is not noticed; use another tensor for other lengths.
    Raises ContractError unless both rise from 0 to the number of tokens. ops.flash_attention leaves this check to the
    backends because it depends on the contents of tensors.
    """
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return None
    starts: tuple[list[int], list[int]] = host_value(call.cu_seqlens_q), host_value(call.cu_seqlens_k)
    for name, values, tokens in zip(("cu_seqlens_q", "cu_seqlens_k"), starts, (call.q.shape[0], call.k.shape[0])):
        rising = values[0] == 0 and values[-1] == tokens and all(a <= b for a, b in pairwise(values))
        require(rising, "flash_attention", f"{name} rising from 0 to {tokens}", values)
    return starts
