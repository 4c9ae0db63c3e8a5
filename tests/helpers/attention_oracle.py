"""A dense float64 oracle of flash attention, and comparisons of calls with it."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from hal import ops

DENSE = ("SBH", "BSH", "SBND", "BSND", "BNSD")
# Error relative to the largest element: float32 sums of a few hundred terms; 16-bit inputs and probabilities.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float64: 1e-11}


def visible(sq: int, sk: int, pre: int | None, next: int | None) -> Tensor:
    """[sq, sk]: i + d - pre <= j <= i + d + next with d = sk - sq."""
    ahead = torch.arange(sk) - (torch.arange(sq)[:, None] + sk - sq)
    return (ahead >= (-sq - sk if pre is None else -pre)) & (ahead <= (sq + sk if next is None else next))


def oracle(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, kept: Tensor | None = None, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """out [b, n, sq, d] and lse [b, n, sq] in float64 of q [b, n, sq, d], k and v [b, g, sk, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    # The scores in these tests are far below 700, so float64 needs no subtraction of the maximum.
    weight = torch.exp((q @ k.mT) * scale) * visible
    total = weight.sum(-1, keepdim=True)
    probability = weight / torch.where(total > 0, total, 1.0)
    if kept is not None:
        probability = probability * kept / (1 - p)
    return probability @ v, total.squeeze(-1).log()


def bnsd(x: Tensor, layout: str, heads: int) -> Tensor:
    if "H" in layout:
        x, layout = x.unflatten(-1, (heads, x.shape[-1] // heads)), layout[:2] + "ND"
    return x.permute([layout.index(c) for c in "BNSD"])


def draw(layout: str, b: int, n: int, s: int, d: int, dtype: torch.dtype, gaps: bool = False) -> Tensor:
    dims = {"B": b, "N": n, "S": s, "D": d, "H": n * d}
    shape = [dims[c] for c in layout]
    wide = torch.randn([*shape[:-1], shape[-1] + (5 if gaps else 0)], dtype=torch.float64).to(dtype)
    return wide[..., : shape[-1]]


def close(got: Tensor, want: Tensor, what: str, tolerance: float) -> None:
    assert got.shape == want.shape, what
    if not want.numel():
        return
    got, want = got.detach().double(), want.detach()
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite]), f"{what}: infinities differ"
    error = (got - want)[~infinite].abs()
    scale = max(1.0, float(want[~infinite].abs().max())) if error.numel() else 1.0
    assert not error.isnan().any() and (not error.numel() or float(error.max()) <= tolerance * scale), (
        f"{what}: off by {float(error.max()):.3g} where {tolerance * scale:.3g} is allowed"
    )


def check(
    layout: str,
    b: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    d: int,
    dtype: torch.dtype = torch.float32,
    *,
    pre: int | None = None,
    next: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    gaps: bool = False,
) -> None:
    """Forward and backward of one call against the oracle."""
    torch.manual_seed(7)
    (n, g), (sq, sk) = heads, sizes
    q, k, v = (draw(layout, b, h, s, d, dtype, gaps) for h, s in ((n, sq), (g, sk), (g, sk)))
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = ops.flash_attention(
        q, k, v, layout=layout, num_heads=n, num_kv_heads=g, pre_tokens=pre, next_tokens=next, mask=mask,
        scale=scale, return_lse=True,
    )  # fmt: skip
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    visible_mask = visible(sq, sk, pre, next) if mask is None else visible(sq, sk, pre, next) & ~mask
    views = [bnsd(x, layout, h) for x, h in zip(exact, (n, g, g))]
    want, want_lse = oracle(*views, visible_mask, 1 / math.sqrt(d) if scale is None else scale)
    tolerance = TOLERANCE[dtype]
    close(bnsd(out, layout, n), want, "out", tolerance)
    close(lse, want_lse, "lse", max(TOLERANCE[torch.float32], 1e-11) if dtype != torch.float64 else 1e-11)
    dout = draw(layout, b, n, sq, d, dtype, gaps)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    want_grads = torch.autograd.grad(want, exact, bnsd(dout, layout, n).double())
    for name, got, right in zip(("dq", "dk", "dv"), grads, want_grads):
        close(got, right, name, 2 * tolerance)


edges = st.none() | st.integers(-20, 120)


def check_drawn(
    data: st.DataObject,
    b: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    head_sizes: st.SearchStrategy[int],
    mask_shapes: list[tuple[int, ...]],
    masked: list[float],
    scales: list[float | None],
) -> None:
    """`check` of a call with random layout, head size, dtype, window, mask, scale and strides."""
    mask = None
    if data.draw(st.booleans()):
        shape = data.draw(st.sampled_from(mask_shapes))
        mask = torch.rand(shape) < data.draw(st.sampled_from(masked))
        if data.draw(st.booleans()) and mask.ndim == 4:
            mask = mask.mT.contiguous().mT  # queries adjacent instead of keys
    check(
        data.draw(st.sampled_from(DENSE)),
        *(b, heads, lengths, data.draw(head_sizes)),
        data.draw(st.sampled_from(list(TOLERANCE))),
        pre=data.draw(edges),
        next=data.draw(edges),
        mask=mask,
        scale=data.draw(st.sampled_from(scales)),
        gaps=data.draw(st.booleans()),
    )
