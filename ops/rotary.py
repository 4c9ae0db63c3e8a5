"""rotary: rotary position embedding, with rotate-half or interleaved pairs.

Source: Su et al., "RoFormer", arXiv 2104.09864. Pair p of a vector is rotated by the angle whose cosine and sine are
given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hal
from hal import Call, Sample, TensorSpec, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

LAYOUTS = ("SBND", "BSND", "BNSD", "TND")


def require_angles(op: str, name: str, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    """Raises ContractError unless cos and sin are angles for x, the argument `name` of `op`, in a layout of rotary."""
    require(layout in LAYOUTS, op, f"a layout among {', '.join(LAYOUTS)}", repr(layout))
    require(x.ndim == len(layout), op, f"{name} with {len(layout)} dimensions for {layout}", tuple(x.shape))
    s = x.shape[layout.index("T" if layout == "TND" else "S")]
    wanted = [(s,)] if layout == "TND" else [(s,), (x.shape[layout.index("B")], s)]
    require(cos.shape == sin.shape, op, "cos and sin of one shape", (tuple(cos.shape), tuple(sin.shape)))
    require(tuple(cos.shape[:-1]) in wanted, op, f"cos of shape [s, r/2] or [b, s, r/2] with s={s}", tuple(cos.shape))
    require(2 * cos.shape[-1] <= x.shape[-1], op, f"r <= head size {x.shape[-1]}", 2 * cos.shape[-1])
    require(cos.dtype == sin.dtype == torch.float32, op, "float32 cos and sin", (cos.dtype, sin.dtype))


def _check(call: Call) -> None:
    require_angles("rotary", "x", call.x, call.cos, call.sin, call.layout)


def _call(
    layout: str, sizes: tuple[int, int, int, int, int], per_sample: bool, strided: str = "", **kw: bool
) -> Sample:
    s, b, n, d, half = sizes
    dims = {"S": s, "B": b, "N": n, "D": d, "T": s}
    angle = TensorSpec((b, s, half) if per_sample else (s, half), dtype=torch.float32)
    return Sample((TensorSpec(tuple(dims[c] for c in layout), strided=strided), angle, angle), {"layout": layout, **kw})


def _edge_cases() -> list[Sample]:
    return [
        *(_call(layout, (5, 2, 3, 8, 4), False, interleaved=i) for layout in LAYOUTS for i in (False, True)),
        *(_call(layout, (5, 2, 3, 8, 4), True) for layout in LAYOUTS[:-1]),
        _call("SBND", (3, 2, 2, 10, 3), False),  # only the first 6 channels are rotated
        _call("BSND", (3, 2, 2, 10, 3), True, interleaved=True),
        _call("BNSD", (4, 1, 2, 7, 3), False, strided="last"),
        _call("SBND", (4, 2, 2, 64, 32), False, strided="rows"),
        _call("TND", (0, 1, 2, 8, 4), False),
        _call("SBND", (3, 2, 1, 4, 0), False),
    ]


def _samples() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        s, b, n, half = (draw(st.integers(1, m)) for m in (9, 3, 4, 20))
        layout = draw(st.sampled_from(LAYOUTS))
        per_sample = layout != "TND" and draw(st.booleans())
        strided = draw(st.sampled_from(["", "rows", "last"]))
        rest = draw(st.integers(0, 5))
        return _call(layout, (s, b, n, 2 * half + rest, half), per_sample, strided, interleaved=draw(st.booleans()))

    return call()


@hal.op(
    check=_check,
    tol={
        torch.float32: Tol(1e-6, 1e-6),  # two products and a sum
        torch.bfloat16: Tol(1.6e-2, 1.6e-2),  # one rounding to 8 bits of a sum whose terms may cancel
        torch.float16: Tol(2e-3, 2e-3),
    },
    samples=_samples,
    edge_cases=_edge_cases,
    grads=("x",),
)
def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "SBND", interleaved: bool = False) -> Tensor:
    """The first r channels of each head rotated by position; the others are copied. The result is like x.

    x: SBND [s,b,n,d], BSND, BNSD or TND [t,n,d]. cos, sin: float32 [s, r/2], or [b, s, r/2] when positions differ per
    sample; they carry no gradient. interleaved=False pairs channel i with i + r/2 (Llama, Megatron's default), True
    pairs 2i with 2i + 1 (GPT-J).
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    if cos.ndim == 3:  # [b, s, r/2] -> the layout's order, heads broadcast
        cos, sin = (t.transpose(0, 1)[:, :, None] if layout == "SBND" else t for t in (cos, sin))
        cos, sin = (t[:, :, None] if layout == "BSND" else t[:, None] if layout == "BNSD" else t for t in (cos, sin))
    elif layout == "BNSD":
        pass  # [s, r/2] already broadcasts over b and n
    else:
        cos, sin = ((t[:, None, None] if layout == "SBND" else t[:, None]) for t in (cos, sin))
    cos, sin = cos.to(acc).detach(), sin.to(acc).detach()
    turned, rest = x[..., : 2 * half].to(acc), x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    first, second = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)
    return torch.cat((pairs.to(x.dtype), rest), dim=-1)
