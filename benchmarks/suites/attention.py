"""Attention against torch: causal in three layouts, a sliding window, growth with S, window and heads, memory, shapes
that do not fit the tiles, and a single query as in decoding.

FLOP counts include only (query, key) pairs inside the band: 4 D per pair forward (two products), 14 D forward and
backward (seven). Masked pairs that a peer computes do not count. A single query is bound by memory, so its ceiling is
the copy rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, product

import torch
import torch.nn.functional as F
from torch import Tensor

from hal import ops

from ..harness import target
from ..harness.case import OURS, Candidate, Case, Thunk
from ..harness.thunks import forward, forward_backward

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class AttentionShape:
    """B sequences of S tokens, H heads of D channels. A query sees itself, `pre` keys before it (None: all) and `next`
    keys after it.

    kv: key/value heads, if fewer than H. lengths: lengths of packed sequences (layout TND), in place of b and s. last:
    only the last token is a query.
    """

    dtype: str = "f32"
    layout: str = "BNSD"
    b: int = 1
    h: int = 8
    s: int = 1024
    d: int = 64
    pre: int | None = None
    next: int = 0
    kv: int | None = None
    lengths: tuple[int, ...] = ()
    last: bool = False

    def __str__(self) -> str:
        band = "causal" if self.pre is None else f"pre{self.pre}" + (f" next{self.next}" if self.next else "")
        heads = f"H{self.h}" + (f"/{self.kv}" if self.kv else "")
        tokens = "+".join(map(str, self.lengths)) if self.lengths else f"{self.s}"
        band = "last query" if self.last else band
        return f"{self.dtype} {self.layout} B{self.b} {heads} S{tokens} D{self.d} {band}"

    def flop(self, backward: bool) -> float:
        """FLOP of the forward pass, or of forward and backward."""
        lengths = self.lengths or (self.s,) * self.b
        pairs = sum(
            s * s - _corner(s - (s if self.pre is None else self.pre)) - _corner(s - self.next) for s in lengths
        )
        return float(self.h * pairs * self.d * (14 if backward else 4))

    def keys_and_values(self) -> float:
        """Bytes of K and V, which are nearly the entire memory traffic of a single query."""
        return float(2 * self.b * (self.kv or self.h) * self.s * self.d * DTYPES[self.dtype].itemsize)

    def inputs(self) -> list[Tensor]:
        """q, k, v in the layout, the same at every call."""
        torch.manual_seed(0)
        tensors = []
        for h, s in ((self.h, 1 if self.last else self.s), *[(self.kv or self.h, self.s)] * 2):
            sizes = {"S": s, "B": self.b, "N": h, "D": self.d, "H": h * self.d, "T": sum(self.lengths)}
            shape = [sizes[c] for c in self.layout]
            tensors.append(torch.randn(shape, device=target.device(), dtype=DTYPES[self.dtype]))
        return tensors

    def bnsd(self, x: Tensor) -> Tensor:
        """A view of x [layout] as [b, n, s, d]; torch's kernels support strides, so peers need no copy."""
        if self.layout in ("SBH", "BSH"):
            x = x.unflatten(-1, (self.h, self.d))  # type: ignore[no-untyped-call]
        return x.permute(_TO_BNSD[self.layout])


def _corner(n: int) -> int:
    """The number of pairs in the triangle outside of a band on one side."""
    return n * (n - 1) // 2 if n > 0 else 0


_TO_BNSD = {"SBH": (1, 2, 0, 3), "BSH": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


def _hal(shape: AttentionShape) -> Attend:
    starts = None
    if shape.lengths:
        starts = torch.tensor([0, *accumulate(shape.lengths)], dtype=torch.int32, device=target.device())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ops.flash_attention(
            q,
            k,
            v,
            layout=shape.layout,
            num_heads=shape.h,
            num_kv_heads=shape.kv or shape.h,
            pre_tokens=shape.pre,
            next_tokens=shape.next,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
        )
        assert isinstance(out, Tensor)  # the result is a tuple only with return_lse
        return out

    return attend


def _sdpa(shape: AttentionShape) -> Attend:
    # torch aligns causal masks at the first key, so a single query would see only one key; without a mask it sees all.
    causal, gqa = not shape.last, shape.kv is not None
    return lambda q, k, v: F.scaled_dot_product_attention(
        shape.bnsd(q), shape.bnsd(k), shape.bnsd(v), is_causal=causal, enable_gqa=gqa
    )


def _sdpa_each(shape: AttentionShape) -> Attend:
    """Packed sequences [t, n, d], computed one after the other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sequences = zip(*(torch.split(x.transpose(0, 1)[None], list(shape.lengths), 2) for x in (q, k, v)))
        outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in sequences]
        return torch.cat(outs, 2)[0].transpose(0, 1)

    return attend


def _sdpa_medium(shape: AttentionShape) -> Attend:
    torch.set_float32_matmul_precision("medium")
    return _sdpa(shape)


def _allowed(s: int, pre: int, next: int = 0) -> Tensor:
    """The keys that are visible to each query, bool [s, s]."""
    i, j = torch.arange(s)[:, None], torch.arange(s)
    return ((j <= i + next) & (j >= i - pre)).to(target.device())


def _sdpa_mask(shape: AttentionShape) -> Attend:
    allowed = _allowed(shape.s, shape.pre if shape.pre is not None else shape.s, shape.next)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def _sdpa_chunked(shape: AttentionShape) -> Attend:
    """Queries in chunks as long as the window, each against its own and the previous chunk's keys."""
    c = shape.pre
    assert c is not None and shape.s % c == 0
    allowed = _allowed(2 * c, c)[c:]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [F.scaled_dot_product_attention(q[:, :, :c], k[:, :, :c], v[:, :, :c], is_causal=True)]
        for i in range(c, shape.s, c):
            keys = slice(i - c, i + c)
            parts.append(
                F.scaled_dot_product_attention(q[:, :, i : i + c], k[:, :, keys], v[:, :, keys], attn_mask=allowed)
            )
        return torch.cat(parts, 2)

    return attend


def _flex(shape: AttentionShape) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    pre = shape.s if shape.pre is None else shape.pre

    def inside(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j >= i - pre)

    blocks = create_block_mask(inside, None, None, shape.s, shape.s, device=str(target.device()))
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def _naive(shape: AttentionShape) -> Attend:
    masked = ~_allowed(shape.s, shape.s)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) / shape.d**0.5
        return torch.softmax(scores.masked_fill(masked, float("-inf")), -1) @ v

    return attend


def _candidate(
    shape: AttentionShape, make: Callable[[AttentionShape], Attend], backward: bool, process: str
) -> Candidate:
    def thunk() -> Thunk:
        inputs = shape.inputs()
        attend = make(shape)
        return forward_backward(attend, inputs, 3) if backward else forward(attend, inputs)

    return Candidate(thunk, process)


_PEERS: dict[str, tuple[Callable[[AttentionShape], Attend], str]] = {
    "sdpa": (_sdpa, "torch"),
    "sdpa-medium": (_sdpa_medium, "medium"),
    "sdpa-mask": (_sdpa_mask, "torch"),
    "sdpa-chunked": (_sdpa_chunked, "torch"),
    "sdpa-each": (_sdpa_each, "torch"),
    "flex": (_flex, "flex"),
    "naive": (_naive, "naive"),
}


def _case(
    name: str,
    shape: AttentionShape,
    backward: bool,
    peers: tuple[str, ...],
    series: str = "",
    x: float = 0.0,
    memory: bool = False,
) -> Case:
    # Memory is measured in a separate process, because a process that has grown before reuses its memory.
    candidates = {OURS: _candidate(shape, _hal, backward, "hal-memory" if memory else "hal")}
    candidates |= {p: _candidate(shape, _PEERS[p][0], backward, _PEERS[p][1]) for p in peers}
    work, ceiling = (shape.keys_and_values(), "copy") if shape.last else (shape.flop(backward), f"GEMM {shape.dtype}")
    return Case(
        name,
        str(shape),
        candidates,
        work=0.0 if memory else work,
        ceiling="" if memory else ceiling,
        series=series,
        x=x,
        quantity="bytes" if memory else "seconds",
    )


LENGTHS = (512, 1024, 2048, 4096, 8192)
_MODES = (("fwd", False), ("fwd+bwd", True))
_BAND = AttentionShape(s=4001, pre=128, next=64)
_PACKED = AttentionShape(layout="TND", lengths=(777, 1531, 300))
ODD = (
    (AttentionShape(s=777, d=40), False, ("sdpa",)),
    (AttentionShape(s=777, d=80), True, ("sdpa",)),
    (AttentionShape(s=1531, d=96), False, ("sdpa",)),
    (AttentionShape(s=1531, kv=2), True, ("sdpa",)),
    (_BAND, False, ("sdpa-mask",)),
    (_BAND, True, ("sdpa-mask",)),
    (_PACKED, False, ("sdpa-each",)),
    (_PACKED, True, ("sdpa-each",)),
)
"""Irregular shapes, which are no multiples of tiles or powers of two: (shape, backward, peers)."""


def cases() -> list[Case]:
    """All attention cases; goals.py has their goals."""
    result = []
    for dtype, layout, (mode, backward), d, s in product(DTYPES, ("BNSD", "SBH", "BSH"), _MODES, (64, 128), LENGTHS):
        plain = layout == "BNSD"
        peers = ("sdpa", "sdpa-medium") if dtype == "f32" and plain else ("sdpa",)
        series = f"{dtype} causal, D {d}, {mode}: S" if plain else ""
        result.append(_case(f"attention {mode}", AttentionShape(dtype, layout, s=s, d=d), backward, peers, series, s))
    window = AttentionShape(s=4096, pre=256)
    for dtype in DTYPES:
        banded = replace(window, dtype=dtype)
        result.append(_case("attention window fwd", banded, False, ("sdpa-mask", "sdpa-chunked", "flex")))
        result.append(_case("attention window fwd+bwd", banded, True, ("sdpa-mask", "sdpa-chunked")))
    for s in (1024, 2048, 4096, 8192, 16384):
        result.append(_case("attention over S", replace(window, s=s), False, ("sdpa-chunked",), "window 256: S", s))
    for pre in (64, 128, 256, 512, 1024, 2048):
        wider = replace(window, pre=pre)
        result.append(_case("attention over window", wider, False, ("sdpa-chunked",), "S 4096: window", pre))
    for h in (1, 2, 4, 8, 16, 32):
        result.append(_case("attention over heads", AttentionShape(h=h), False, ("sdpa",), "S 1024 causal: heads", h))
    for odd, backward, peers in ODD:
        mode = "fwd+bwd" if backward else "fwd"
        result.append(_case(f"attention odd shapes {mode}", odd, backward, peers))
    for dtype, (h, kv, d, s) in product(DTYPES, ((12, None, 64, 1024), (32, 8, 128, 4096))):
        result.append(
            _case("attention one query", AttentionShape(dtype, h=h, kv=kv, d=d, s=s, last=True), False, ("sdpa",))
        )
    result.append(_case("attention memory", AttentionShape(s=8192), True, ("naive",), memory=True))
    return result
