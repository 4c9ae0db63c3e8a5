"""Tensor layouts of attention, by their letters: S sequence, B batch, N heads, D head size, T packed tokens, H = N*D.

All results are views: no function here copies data.
"""

from __future__ import annotations

from torch import Tensor

LAYOUTS = ("SBH", "BSH", "SBND", "BSND", "BNSD", "TND")

_TO_BNSD = {"SBND": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
_FROM_BNSD = {"SBND": (2, 0, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


def to_bnsd(x: Tensor, layout: str, num_heads: int) -> Tensor:
    """x of a dense `layout` as [b, n, s, d]."""
    if layout in ("SBH", "BSH"):
        x = x.unflatten(-1, (num_heads, x.shape[-1] // num_heads))  # type: ignore[no-untyped-call]
        layout = layout[:2] + "ND"
    return x.permute(_TO_BNSD[layout])


def from_bnsd(x: Tensor, layout: str) -> Tensor:
    """[b, n, s, d] as a dense `layout`."""
    if layout in ("SBH", "BSH"):
        return x.permute(_FROM_BNSD[layout[:2] + "ND"]).flatten(-2)
    return x.permute(_FROM_BNSD[layout])


def sizes(x: Tensor, layout: str, num_heads: int | None) -> tuple[int, int, int, int]:
    """(batch, heads, length, head size) of x; batch is 1 and length the token count for TND."""
    shape = tuple(x.shape)
    if layout == "TND":
        return 1, shape[1], shape[0], shape[2]
    if layout in ("SBH", "BSH"):
        assert num_heads is not None
        b, s = (shape[1], shape[0]) if layout == "SBH" else (shape[0], shape[1])
        return b, num_heads, s, shape[2] // num_heads
    at = layout.index
    return shape[at("B")], shape[at("N")], shape[at("S")], shape[at("D")]
