"""flash_attention: exact attention with pre/next-token windows, GQA, packed sequences and reproducible dropout.

The window is exact on every backend (it equals flash-attn's window_size=(pre, next) and Ascend's sparse_mode 4); a
query without a visible key gives 0. docs/adr/0032 lists what changes the scores (softcap, ALiBi, bias, sinks) and in
which order. Shape letters: B batch, N query heads, G key/value heads, Q/K lengths, D head size, E head size of v.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import hal
from hal import Call, Rng, Sample, TensorSpec, Tol, require

from .layouts import LAYOUTS, from_bnsd, sizes, to_bnsd
from .random import keep_mask, require_probability

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_OP = "flash_attention"


def _check_shapes(
    layout: str,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dtypes: tuple[torch.dtype, ...],
    num_heads: int | None,
    num_kv_heads: int | None,
    mask: tuple[torch.Size, torch.dtype] | None,
    cu: tuple[tuple[torch.Size, torch.dtype] | None, ...],
) -> None:
    require(layout in LAYOUTS, _OP, f"a layout among {', '.join(LAYOUTS)}", repr(layout))
    for name, shape in (("q", q), ("k", k), ("v", v)):
        require(len(shape) == len(layout), _OP, f"{name} with {len(layout)} dimensions for {layout}", tuple(shape))
    require(len(set(dtypes)) == 1, _OP, "q, k, v of one dtype", dtypes)
    require(k[:-1] == v[:-1], _OP, "k and v of one shape, except for the head size", (tuple(k), tuple(v)))
    if layout in ("SBH", "BSH"):
        require(num_heads is not None, _OP, f"num_heads, which {layout} does not show", None)
        assert num_heads is not None
        kv = num_kv_heads or num_heads
        require(
            num_heads > 0 and q[-1] % num_heads == 0, _OP, f"q's last size divisible by num_heads={num_heads}", q[-1]
        )
        require(kv > 0 and k[-1] % kv == 0, _OP, f"k's last size divisible by num_kv_heads={kv}", k[-1])
        require(v[-1] % kv == 0, _OP, f"v's last size divisible by num_kv_heads={kv}", v[-1])
        n, g, d, dk = num_heads, kv, q[-1] // num_heads, k[-1] // kv
    else:
        at = layout.index
        n, g, d, dk = q[at("N")], k[at("N")], q[at("D")], k[at("D")]
        require(num_heads in (None, n), _OP, f"num_heads={n}, as in q's shape", num_heads)
        require(num_kv_heads in (None, g), _OP, f"num_kv_heads={g}, as in k's shape", num_kv_heads)
    require(d == dk and d > 0, _OP, "q and k of one head size, at least 1", (d, dk))
    require(v[-1] > 0, _OP, "a head size of v of at least 1", tuple(v))
    require(g > 0 and n % g == 0, _OP, "query heads divisible by key/value heads", f"{n} and {g}")
    if layout == "TND":
        require(all(c is not None for c in cu), _OP, "cu_seqlens_q and cu_seqlens_k for TND", "none")
        require(mask is None, _OP, "no mask with TND (use pre_tokens/next_tokens)", "a mask")
        for c in cu:
            assert c is not None
            require(c[1] == torch.int32 and len(c[0]) == 1 and c[0][0] >= 1, _OP, "int32 cu_seqlens of shape [b+1]", c)
        require(cu[0] == cu[1], _OP, "cu_seqlens_q and cu_seqlens_k of one length", cu)
        return
    require(cu == (None, None), _OP, f"no cu_seqlens with {layout}", cu, "Packed sequences have layout TND.")
    if layout != "TND":
        at_b = layout.index("B")
        require(q[at_b] == k[at_b], _OP, "q and k of one batch size", (q[at_b], k[at_b]))
    if mask is not None:
        shape, dtype = mask
        at_s = layout.index("S")
        full = (q[layout.index("B")], n, q[at_s], k[at_s])
        fits = len(shape) <= 4 and all(m in (1, f) for m, f in zip(reversed(shape), reversed(full)))
        require(dtype == torch.bool, _OP, "a bool mask (True = masked out)", dtype)
        require(fits, _OP, f"a mask that broadcasts to [b, n, sq, skv] = {full}", tuple(shape))


def _check_scores(call: Call) -> None:
    """The arguments that change the scores."""
    q, softcap, slopes, bias, sinks = call.q, call.softcap, call.alibi_slopes, call.bias, call.sinks
    b, n, sq, _ = sizes(q, call.layout, call.num_heads)
    packed = call.layout == "TND"
    require(softcap is None or 0 < softcap < math.inf, _OP, "a softcap that is positive and finite, or None", softcap)
    if slopes is not None:
        sequences = len(call.cu_seqlens_q) - 1 if packed else b
        shapes = ((n,), (sequences, n))
        require(slopes.dtype == torch.float32, _OP, "alibi_slopes of float32", slopes.dtype)
        require(slopes.shape in shapes, _OP, f"alibi_slopes of shape [{n}] or [{sequences}, {n}]", tuple(slopes.shape))
    if sinks is not None:
        require(sinks.shape == (n,), _OP, f"sinks of shape [{n}], one logit per query head", tuple(sinks.shape))
        require(sinks.dtype in (q.dtype, torch.float32), _OP, "sinks of q's dtype or float32", sinks.dtype)
    if bias is not None:
        require(not packed, _OP, "no bias with TND (use alibi_slopes, or one dense call per sequence)", "a bias")
        full = (b, n, sq, call.k.shape[call.layout.index("S")])
        require(bias.dtype == q.dtype, _OP, f"a bias of q's dtype, {q.dtype}", bias.dtype)
        fits = bias.ndim <= 4 and all(m in (1, f) for m, f in zip(reversed(bias.shape), reversed(full)))
        require(fits, _OP, f"a bias that broadcasts to [b, n, sq, skv] = {full}", tuple(bias.shape))


def _check(call: Call) -> None:
    q, k, mask, scale, rng = call.q, call.k, call.mask, call.scale, call.rng
    _check_shapes(
        call.layout,
        q.shape,
        k.shape,
        call.v.shape,
        (q.dtype, k.dtype, call.v.dtype),
        call.num_heads,
        call.num_kv_heads,
        None if mask is None else (mask.shape, mask.dtype),
        tuple(None if c is None else (c.shape, c.dtype) for c in (call.cu_seqlens_q, call.cu_seqlens_k)),
    )
    for name, value in (("pre_tokens", call.pre_tokens), ("next_tokens", call.next_tokens)):
        require(value is None or isinstance(value, int), _OP, f"{name} an integer or None", value)
    require(scale is None or math.isfinite(scale), _OP, "a finite scale", scale)
    _check_scores(call)
    if call.dropout_p or rng is not None:
        require_probability(_OP, call.dropout_p, rng)
        if rng is not None:
            rng.indexing(draw_shape(q, k, call.layout, call.num_heads))


def draw_shape(q: Tensor, k: Tensor, layout: str, num_heads: int | None = None) -> tuple[int, ...]:
    """Shape of the dropout draw: [b, n, sq, skv], or [n, tq, tk] for TND (packed token indices on both sides)."""
    b, n, sq, _ = sizes(q, layout, num_heads)
    skv = k.shape[0] if layout == "TND" else k.shape[layout.index("S")]
    return (n, sq, skv) if layout == "TND" else (b, n, sq, skv)


_FAR = 1 << 40
"""A window's edge that lies beyond every sequence."""


def band_mask(
    sq: int, skv: int, pre: int | None, next: int | None, device: torch.device | None = None
) -> Tensor | None:
    """bool [sq, skv], True = outside the window `i + d - pre <= j <= i + d + next`, d = skv - sq; None = all inside."""
    if pre is None and next is None:
        return None
    # Positions are 64-bit integers, to which an edge near 2**63 cannot be added.
    pre, next = (None if edge is None else max(-_FAR, min(edge, _FAR)) for edge in (pre, next))
    i = torch.arange(sq, device=device)[:, None] + (skv - sq)
    j = torch.arange(skv, device=device)
    outside = torch.zeros(sq, skv, dtype=torch.bool, device=device)
    if pre is not None:
        outside |= j < i - pre
    if next is not None:
        outside |= j > i + next
    return outside


class _Scores(NamedTuple):
    """The arguments that change the scores of a call, or of one of its sequences; None and 0 change nothing.

    masked: True = hidden. bias: added. keep: of the dropout with probability p. These broadcast to [b, n, sq, skv];
    sinks: [n].
    """

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    masked: Tensor | None = None
    sinks: Tensor | None = None
    keep: Tensor | None = None
    p: float = 0.0


def alibi_bias(slopes: Tensor, sq: int, skv: int, offset: int) -> Tensor:
    """-slope |i + offset - j|, [b or 1, n, sq, skv] for slopes [n] or [b, n] (Press et al., 2022, as in flash-attn).

    offset: skv - sq, or 0 where windows are aligned at the top left.
    """
    i = torch.arange(sq, device=slopes.device)[:, None] + offset
    distance = (i - torch.arange(skv, device=slopes.device)).abs().to(slopes.dtype)
    return -slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance


def _dense(q_BNQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, how: _Scores) -> tuple[Tensor, Tensor]:
    """out [b, n, sq, e] in q's dtype, lse [b, n, sq] in the accumulation dtype."""
    acc = torch.promote_types(q_BNQD.dtype, torch.float32)
    group = q_BNQD.shape[1] // k_BGKD.shape[1]
    k_BNKD = k_BGKD.to(acc).repeat_interleave(group, dim=1)
    v_BNKE = v_BGKE.to(acc).repeat_interleave(group, dim=1)
    s_BNQK = q_BNQD.to(acc) @ k_BNKD.transpose(-1, -2) * how.scale
    if how.softcap is not None:
        s_BNQK = how.softcap * torch.tanh(s_BNQK / how.softcap)
    if how.bias is not None:
        s_BNQK = s_BNQK + how.bias.to(acc)
    if how.masked is not None:
        s_BNQK = s_BNQK.masked_fill(how.masked, -math.inf)
    # A sink is one more key, whose value is 0: its column takes part in the softmax only.
    columns = s_BNQK.shape[-1]
    if how.sinks is not None:
        sink = how.sinks.to(acc)[:, None, None].expand(*s_BNQK.shape[:-1], 1)
        s_BNQK = torch.cat([s_BNQK, sink], -1)
    if s_BNQK.shape[-1] == 0:
        return (s_BNQK @ v_BNKE).to(q_BNQD.dtype), s_BNQK.new_full(s_BNQK.shape[:-1], -math.inf)
    # A row without a visible key has max -inf; shifting it by 0 instead keeps exp(-inf) = 0 and the row's sum 0.
    top = s_BNQK.detach().amax(-1, keepdim=True)
    e_BNQK = torch.exp(s_BNQK - torch.where(top == -math.inf, torch.zeros_like(top), top))
    total = e_BNQK.sum(-1, keepdim=True)
    p_BNQK = (e_BNQK / torch.where(total == 0, torch.ones_like(total), total))[..., :columns]
    if how.keep is not None:
        p_BNQK = torch.where(how.keep, p_BNQK * (1.0 / (1.0 - how.p)), torch.zeros_like(p_BNQK))
    lse = torch.where(total == 0, torch.full_like(total, -math.inf), top + total.log()).squeeze(-1)
    return (p_BNQK @ v_BNKE).to(q_BNQD.dtype), lse.detach()


def _attention(
    *names: str, layout: str = "BNSD", shape: tuple[int, ...], heads: tuple[int, int] = (2, 2), e: int = 0, **kw: Any
) -> Sample:
    """A sample call: shape = (b, sq, skv, d), heads = (n, kv heads), e = head size of v (0: d)."""
    b, sq, skv, d = shape
    n, g = heads

    def tensor(length: int, count: int, d: int = d) -> TensorSpec:
        dims = {"S": length, "B": b, "N": count, "D": d, "H": count * d}
        return TensorSpec(tuple(dims[c] for c in layout), strided="rows" if "strided" in names else "")

    if layout in ("SBH", "BSH"):
        kw = {"num_heads": n, "num_kv_heads": g, **kw}
    return Sample((tensor(sq, n), tensor(skv, g), tensor(skv, g, e or d)), {"layout": layout, **kw})


def _packed(
    q_lengths: list[int], k_lengths: list[int], d: int, heads: tuple[int, int], e: int = 0, **kw: Any
) -> Sample:
    def starts(lengths: list[int]) -> TensorSpec:
        total = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        return TensorSpec((len(total),), "values", values=tuple(float(t) for t in total), dtype=torch.int32)

    q, k, v = (
        TensorSpec((sum(q_lengths), heads[0], d)),
        *(TensorSpec((sum(k_lengths), heads[1], n)) for n in (d, e or d)),
    )
    cu = {"cu_seqlens_q": starts(q_lengths), "cu_seqlens_k": starts(k_lengths)}
    return Sample((q, k, v), {"layout": "TND", **cu, **kw})


def _slopes(*shape: int) -> TensorSpec:
    """ALiBi slopes, 2^-1 of the first head, 2^-2 of the next, ..."""
    values = tuple(0.5 ** (1 + i) for i in range(math.prod(shape)))
    return TensorSpec(shape, "values", values=values, dtype=torch.float32)


def _score_cases() -> list[Sample]:
    """Calls with the arguments that change scores, alone and combined, and with heads of v of another size."""
    rng = Rng(11, 5)
    hidden = TensorSpec((2, 1, 5, 7), "bool", p=0.7, dtype=torch.bool)
    every_row_dead = TensorSpec((1, 7), "bool", p=1.0, dtype=torch.bool)
    everything: dict[str, Any] = {"softcap": 2.0, "alibi_slopes": _slopes(4), "sinks": TensorSpec((4,))}
    return [
        *(_attention(layout=layout, shape=(2, 9, 9, 12), e=8, heads=(4, 2), next_tokens=0) for layout in LAYOUTS[:-1]),
        _attention("strided", layout="BSND", shape=(1, 17, 33, 8), e=16, return_lse=True),
        _attention(shape=(1, 70, 130, 48), e=33, next_tokens=0),
        _attention(shape=(1, 1, 40, 24), e=16, heads=(4, 1), next_tokens=0),  # decoding
        _attention(shape=(1, 4, 0, 8), e=4, sinks=TensorSpec((2,)), return_lse=True),
        _packed([3, 0, 9], [3, 4, 9], 12, (4, 2), e=8, next_tokens=0),
        _attention(shape=(2, 9, 9, 8), softcap=1.5, scale=1.0, next_tokens=0),
        _attention(shape=(1, 9, 9, 8), softcap=30.0, scale=20.0),
        _attention(shape=(1, 9, 9, 8), softcap=1.0, scale=-1.5),
        _attention(shape=(1, 9, 9, 8), softcap=50.0, scale=0.0, return_lse=True),
        _attention(
            shape=(1, 3, 40, 8),
            heads=(4, 2),
            softcap=2.0,
            next_tokens=0,
            mask=TensorSpec((3, 1), "bool", p=0.3, dtype=torch.bool),
        ),
        _attention(shape=(2, 5, 7, 8), softcap=2.0, mask=hidden),
        _attention(shape=(2, 9, 9, 8), alibi_slopes=_slopes(2), next_tokens=0),
        _attention(shape=(2, 5, 7, 8), alibi_slopes=_slopes(2, 2), pre_tokens=3, return_lse=True),  # also to the right
        _packed([3, 0, 9], [3, 4, 12], 8, (4, 2), alibi_slopes=_slopes(3, 4)),
        *(
            _attention(shape=(2, 5, 7, 16), bias=TensorSpec(shape))
            for shape in ((7,), (5, 1), (1, 2, 5, 7), (2, 1, 1, 7), (2, 1, 5, 7), (2, 2, 5, 7))
        ),
        _attention(
            "strided",
            layout="SBH",
            shape=(2, 50, 70, 8),
            heads=(4, 2),
            bias=TensorSpec((1, 4, 50, 70), strided="rows"),
            next_tokens=0,
        ),
        _attention(shape=(2, 5, 7, 8), bias=TensorSpec((5, 7)), mask=every_row_dead),
        _attention(shape=(2, 7, 7, 8), sinks=TensorSpec((2,)), next_tokens=0, return_lse=True),
        # A query that sees only the sink gives 0, and the sink's logit as lse.
        _attention(shape=(2, 5, 7, 8), sinks=TensorSpec((2,)), mask=every_row_dead, return_lse=True),
        _attention(shape=(1, 12, 12, 8), sinks=TensorSpec((2,)), next_tokens=-2),
        _attention(shape=(1, 1, 40, 8), heads=(4, 1), sinks=TensorSpec((4,), scale=30.0)),
        _attention(shape=(1, 9, 9, 8), sinks=TensorSpec((2,), scale=200.0)),
        _attention(shape=(2, 13, 13, 8), heads=(4, 2), dropout_p=0.25, rng=rng, sinks=TensorSpec((4,)), next_tokens=0),
        _packed([5, 8], [7, 8], 8, (4, 2), sinks=TensorSpec((4,)), pre_tokens=2, return_lse=True),
        _attention(shape=(1, 10, 5, 8), next_tokens=0, top_left=True),
        _attention(shape=(1, 5, 10, 8), pre_tokens=2, next_tokens=1, alibi_slopes=_slopes(2), top_left=True),
        _packed([3, 9, 0, 4], [5, 9, 4, 2], 8, (4, 2), next_tokens=0, top_left=True),
        _packed([7, 3], [2, 9], 8, (2, 2), pre_tokens=2, next_tokens=1, top_left=True, return_lse=True),
        _packed([7, 3], [2, 9], 8, (4, 2), e=4, top_left=True, **everything, next_tokens=0),
        _attention(
            shape=(2, 60, 60, 16), e=8, heads=(4, 2), **everything, bias=TensorSpec((1, 4, 60, 60)), next_tokens=0
        ),
        _attention(shape=(1, 6, 6, 8), heads=(4, 2), **everything, bias=TensorSpec((6, 6)), dropout_p=0.5, rng=rng),
    ]


def _edge_cases() -> list[Sample]:
    rng = Rng(11, 5)
    band: dict[str, Any] = {"pre_tokens": 3, "next_tokens": 2}
    return [
        *(_attention(layout=layout, shape=(2, 9, 9, 8), next_tokens=0) for layout in LAYOUTS[:-1]),
        *(_attention("strided", layout=layout, shape=(2, 5, 7, 4), heads=(4, 2)) for layout in LAYOUTS[:-1]),
        _attention(shape=(1, 17, 33, 16), heads=(6, 2), **band),
        _attention(shape=(1, 33, 17, 16), pre_tokens=4, next_tokens=0),  # no key is visible to the first queries
        _attention(shape=(1, 10, 5, 8), pre_tokens=3),  # no right edge, and more queries than keys
        _attention(shape=(1, 12, 12, 8), pre_tokens=5, next_tokens=-2),  # negative edge: dead rows at the start
        _attention(shape=(1, 12, 12, 8), pre_tokens=-2, next_tokens=6),
        _attention(shape=(1, 6, 6, 8), pre_tokens=-9, next_tokens=-9),  # nothing is visible at all
        _attention(shape=(2, 5, 7, 8), mask=TensorSpec((2, 1, 5, 7), "bool", p=0.7, dtype=torch.bool)),
        _attention(shape=(2, 5, 7, 8), mask=TensorSpec((1, 7), "bool", p=1.0, dtype=torch.bool)),  # every row dead
        _attention(shape=(2, 8, 8, 8), mask=TensorSpec((2, 2, 8, 8), "bool", p=0.3, dtype=torch.bool), **band),
        _attention(shape=(2, 7, 7, 8), next_tokens=0, return_lse=True),
        _attention(shape=(1, 1, 1, 1), heads=(1, 1)),  # one key
        _attention(shape=(1, 1, 40, 8), next_tokens=0),  # decoding
        _attention(shape=(0, 4, 4, 8)),
        _attention(shape=(1, 0, 4, 8)),
        _attention(shape=(1, 4, 0, 8), return_lse=True),
        _attention(shape=(1, 9, 9, 8), scale=20.0),
        _attention(shape=(1, 9, 9, 8), scale=0.0),
        _attention(shape=(1, 9, 9, 8), scale=-1.5),
        _attention(shape=(2, 13, 13, 8), next_tokens=0, dropout_p=0.25, rng=rng),
        _attention(shape=(2, 5, 5, 8), dropout_p=0.5, rng=rng.block((4, 6, 9, 12), (1, 2, 3, 4))),
        _packed([3, 0, 9, 1], [3, 4, 9, 6], 8, (4, 2), next_tokens=0),
        _packed([10, 2], [2, 2], 8, (2, 2), pre_tokens=1),
        _packed([5, 8], [7, 8], 16, (2, 2), pre_tokens=2, next_tokens=1, return_lse=True),
        _packed([5, 8], [7, 8], 8, (2, 1), dropout_p=0.3, rng=rng),
        _packed([3, 0, 2], [3, 4, 2], 8, (1, 1), next_tokens=0, return_lse=True),  # one head: a product without rows
        _attention(shape=(2, 5, 7, 8), mask=TensorSpec((1, 7), "bool", p=0.5, dtype=torch.bool), return_lse=True),
        _attention(shape=(1, 70, 130, 33), next_tokens=0),  # several tiles, odd head size
        _attention(shape=(1, 130, 130, 64), heads=(2, 1), pre_tokens=40, next_tokens=0),
        _attention(shape=(1, 3, 5, 256), heads=(1, 1)),
        *_score_cases(),
    ]


def _samples() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    edge = st.none() | st.integers(-6, 24)

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        g, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        d = draw(st.sampled_from([1, 3, 8, 16, 17, 32]))
        kw: dict[str, Any] = {"pre_tokens": draw(edge), "next_tokens": draw(edge)}
        if draw(st.booleans()):
            kw |= {"dropout_p": draw(st.sampled_from([0.1, 0.5])), "rng": Rng(draw(st.integers(0, 2**32)))}
        if draw(st.booleans()):
            kw["scale"] = draw(st.sampled_from([0.3, 1.0, 2.0]))
        if draw(st.booleans()):
            kw["return_lse"] = True
        n = g * group
        # Most calls have none of these, so that kernels without them are still drawn often.
        plain = draw(st.integers(0, 2)) > 0
        e = d if plain else draw(st.sampled_from([d, 4, 24]))
        if not plain:
            kw["softcap"] = draw(st.sampled_from([None, 1.0, 50.0]))
            kw["alibi_slopes"] = draw(st.sampled_from([None, _slopes(n)]))
            kw["sinks"] = draw(st.sampled_from([None, TensorSpec((n,))]))
            kw["top_left"] = draw(st.booleans())
        length = st.integers(1, 40)
        if draw(st.integers(0, 4)) == 0:
            pairs = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4))
            return _packed([a for a, _ in pairs], [b for _, b in pairs], d, (n, g), e, **kw)
        b, sq, skv = draw(st.integers(1, 2)), draw(length), draw(length)
        if draw(st.booleans()):
            shape = draw(st.sampled_from([(sq, skv), (b, 1, sq, skv), (b, n, 1, skv), (1, 1, sq, 1)]))
            kw["mask"] = TensorSpec(shape, "bool", p=draw(st.sampled_from([0.1, 0.5, 0.9])), dtype=torch.bool)
        if not plain and draw(st.booleans()):
            kw["bias"] = TensorSpec(draw(st.sampled_from([(sq, skv), (b, 1, sq, skv), (1, n, 1, skv), (b, n, sq, 1)])))
        names = ("strided",) if draw(st.booleans()) else ()
        layout = draw(st.sampled_from(LAYOUTS[:-1]))
        return _attention(*names, layout=layout, shape=(b, sq, skv, d), heads=(n, g), e=e, **kw)

    return call()


def _shapes(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """The lengths of packed sequences are values, and for large shapes a matrix of fake scores costs time."""
    q, v, layout = call.q, call.v, call.layout
    b, n, sq, _ = sizes(q, layout, call.num_heads)
    if layout in ("SBH", "BSH"):
        width = n * (v.shape[-1] // (call.num_kv_heads or n))
    else:
        width = v.shape[-1]
    out = q.new_empty((*q.shape[:-1], width))
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty((n, sq) if layout == "TND" else (b, n, sq), dtype=dtype)
    return (out, lse) if call.return_lse else out


@hal.op(
    check=_check,
    tol={
        # Scores reach |s| ~ 100 in the samples; float32 rounds them to ~1e-5 absolute, which exp passes on.
        torch.float32: Tol(2e-5, 1e-5),
        # Inputs and probabilities carry 8 bits (bf16) and 11 bits (fp16): 2^-8 and 2^-11 per product, sums average it.
        torch.bfloat16: Tol(1.6e-2, 1.6e-2),
        torch.float16: Tol(2e-3, 2e-3),
    },
    samples=_samples,
    edge_cases=_edge_cases,
    grads=("q", "k", "v", "bias", "sinks"),
    nondiff_outputs=(1,),
    shapes=_shapes,
    # 2: v may have another head size than k, which no parameter indicates.
    version=2,
)
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    pre_tokens: int | None = None,
    next_tokens: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    top_left: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(mask(scale * q k^T)) v, without storing the matrix (in the backends; the reference stores it).

    q, k, v: `layout` SBH [s,b,n*d], BSH [b,s,n*d], SBND, BSND, BNSD, or TND [t,n,d] (packed sequences, with int32
        cu_seqlens_q/k [b+1] that start with 0 and end with the token count). The heads of v, and so those of the
        output, may have another size than those of q and k.
    num_heads: query heads; required for SBH and BSH. num_kv_heads: key/value heads, a divisor (GQA).
    pre_tokens, next_tokens: with d = skv - sq, key j is visible to query i iff i+d-pre <= j <= i+d+next. None =
        unbounded, negative values allowed; causal is next_tokens=0.
    mask: bool, True = masked out, broadcastable to [b,n,sq,skv]; on top of the window.
    scale: default 1/sqrt(d). dropout_p, rng: dropout on the probabilities; element (b,n,i,j) of a draw of
        [b,n,sq,skv] ([n,tq,tk] for TND).
    softcap: c > 0 replaces a scaled score s by c tanh(s / c) (Gemma 2), before biases and masks are applied.
    alibi_slopes: float32 [n] or [b,n] (b sequences if packed), without gradient: adds -slope |i+d-j|.
    bias: q's dtype, added to the scores; broadcastable to [b,n,sq,skv]; not for TND.
    sinks: [n], a logit per head that takes part in the softmax like one more visible key whose value is 0 (gpt-oss).
    top_left: windows and ALiBi have d = 0, so that they are aligned with the first query and key (of each sequence).
    Returns the output in q's layout; with return_lse also the log-sum-exp, float32 [b,n,sq] ([n,t] for TND), which
        includes the sink and carries no gradient. A query without a visible key gives 0, lse -inf (the sink's logit, if
        there is one), gradient 0.
    """
    _, n, sq, d = sizes(q, layout, num_heads)
    how = _Scores(1.0 / math.sqrt(d) if scale is None else scale, softcap, bias, sinks=sinks, p=dropout_p)
    keep = None
    if dropout_p > 0.0 and rng is not None:
        keep = keep_mask(draw_shape(q, k, layout, num_heads), dropout_p, rng, q.device)
    if layout != "TND":
        g = num_kv_heads or (n if layout in ("SBH", "BSH") else k.shape[layout.index("N")])
        q_BNQD, k_BGKD, v_BGKE = to_bnsd(q, layout, n), to_bnsd(k, layout, g), to_bnsd(v, layout, g)
        skv = k_BGKD.shape[2]
        masked = _band(sq, skv, pre_tokens, next_tokens, top_left, q.device)
        if mask is not None:
            masked = mask if masked is None else mask | masked
        if alibi_slopes is not None:
            alibi = alibi_bias(alibi_slopes, sq, skv, 0 if top_left else skv - sq)
            how = how._replace(bias=alibi if bias is None else alibi + bias)
        out, lse = _dense(q_BNQD, k_BGKD, v_BGKE, how._replace(masked=masked, keep=keep))
        out = from_bnsd(out, layout)
    else:
        assert cu_seqlens_q is not None and cu_seqlens_k is not None
        window = (pre_tokens, next_tokens, top_left)
        out, lse = _tnd(q, k, v, cu_seqlens_q, cu_seqlens_k, window, alibi_slopes, how, keep)
    lse = lse if q.dtype == torch.float64 else lse.to(torch.float32)
    return (out, lse) if return_lse else out


def _band(sq: int, skv: int, pre: int | None, next: int | None, top_left: bool, device: torch.device) -> Tensor | None:
    """`band_mask`, or the one with d = 0."""
    d = skv - sq if top_left else 0
    return band_mask(sq, skv, None if pre is None else pre + d, None if next is None else next - d, device)


def _tnd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    window: tuple[int | None, int | None, bool],
    slopes: Tensor | None,
    how: _Scores,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention within each packed sequence. q [tq, n, d], k [tk, g, d], v [tk, g, e] -> out [tq, n, e], lse [n, tq].

    window: (pre, next, top_left). keep: [n, tq, tk].
    """
    q_ends, k_ends = cu_q.tolist(), cu_k.tolist()
    for name, ends, total in (("cu_seqlens_q", q_ends, q.shape[0]), ("cu_seqlens_k", k_ends, k.shape[0])):
        rising = all(a <= b for a, b in pairwise(ends))
        require(ends[0] == 0 and rising and ends[-1] == total, _OP, f"{name} rising from 0 to {total}", ends)
    # Without any queries, keys, values and sinks still have gradients: zeros.
    none = q[:0, :, :1] + k[:0, :1, :1] + v[:0, :1]
    none = none if how.sinks is None else none + how.sinks[:, None].to(none.dtype)
    outs, lses = [none], [q.new_empty(q.shape[1], 0, dtype=torch.promote_types(q.dtype, torch.float32))]
    for number, (q0, q1, k0, k1) in enumerate(zip(q_ends[:-1], q_ends[1:], k_ends[:-1], k_ends[1:])):
        if q0 == q1:
            continue
        q_BNQD, k_BGKD, v_BGKE = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        part = how._replace(masked=_band(q1 - q0, k1 - k0, *window, q.device))
        if slopes is not None:
            own = slopes if slopes.ndim == 1 else slopes[number]
            offset = 0 if window[2] else (k1 - k0) - (q1 - q0)
            part = part._replace(bias=alibi_bias(own, q1 - q0, k1 - k0, offset))
        if keep is not None:
            part = part._replace(keep=keep[:, q0:q1, k0:k1])
        out, lse = _dense(q_BNQD, k_BGKD, v_BGKE, part)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)
