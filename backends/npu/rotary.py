"""rotary (npu_rotary_mul), computed in float32. The backward pass rotates by the negative angles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import Call, ops

from .constraints import CONSTRAINTS
from .device import Npu
from .tensors import reasons


def _why_not(call: Call) -> Sequence[str]:
    heads = call.x.shape[2 if call.layout in ("SBND", "BSND") else 1]
    return [
        *reasons(call.x),
        *CONSTRAINTS["rotary.head_size"].refusal("rotated channels", 2 * call.cos.shape[-1]),
        *CONSTRAINTS["rotary.half_heads"].refusal("heads", heads),
    ]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, interleaved: bool) -> Tensor:
    """x [s, b, n, d], in another layout or packed [t, n, d], rotated; cos and sin [s, r/2] or [b, s, r/2].

    The operator gets all tokens as one sequence [1, t, n, r] with an angle per token, [1, t, 1, r]. That is the one
    form which both modes take for any batch: interleaved, it has no angles per sample, and the product of batch and
    heads is limited.
    """
    half = cos.shape[-1]
    if not half or not x.numel():
        return x.clone()
    # npu_rotary_mul takes one angle per channel.
    cos, sin = (
        t.repeat_interleave(2, dim=-1) if interleaved else torch.cat((t, t), dim=-1)
        for t in (cos.detach(), sin.detach())
    )
    tokens = x.transpose(1, 2) if layout == "BNSD" else x  # [..., n, d], the leading dimensions count tokens
    if layout == "SBND":
        cos, sin = (t.transpose(0, 1) if t.ndim == 3 else t[:, None] for t in (cos, sin))
    leading = tokens.shape[:-2]
    cos, sin = (t.expand(*leading, 2 * half).reshape(1, -1, 1, 2 * half) for t in (cos, sin))
    rotated = tokens[..., : 2 * half].float().reshape(1, -1, tokens.shape[-2], 2 * half)
    y = torch.ops.npu.npu_rotary_mul(rotated, cos, sin, "interleave" if interleaved else "half").to(x.dtype)
    y = y.reshape(*leading, tokens.shape[-2], 2 * half)
    y = y.transpose(1, 2) if layout == "BNSD" else y
    return torch.cat((y, x[..., 2 * half :]), dim=-1)


def _rotary_bwd(residuals: tuple[Tensor, Tensor, str, bool], dy: Tensor) -> tuple[Tensor]:
    """dx from dy like x: the rotation by the negative angles, whose sine is -sin."""
    cos, sin, layout, interleaved = residuals
    return (_rotate(dy, cos, -sin, layout, interleaved),)


@Npu.impl(ops.rotary, id="npu/rotary_mul", why_not=_why_not, bwd=_rotary_bwd)
def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "SBND", interleaved: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor, str, bool]]:
    return _rotate(x, cos, sin, layout, interleaved), (cos, sin, layout, interleaved)
