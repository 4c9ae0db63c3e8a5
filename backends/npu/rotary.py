"""rotary (npu_rotary_mul), computed in float32. The backward pass rotates by the negative angles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import Call, ops

from .device import Npu
from .tensors import reasons

_HEAD_LIMIT = 896


def _why_not(call: Call) -> Sequence[str]:
    refusals = reasons(call.x)
    if 2 * call.cos.shape[-1] >= _HEAD_LIMIT:
        refusals.append(f"{2 * call.cos.shape[-1]} rotated channels (npu_rotary_mul takes fewer than {_HEAD_LIMIT})")
    return refusals


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, interleaved: bool) -> Tensor:
    """x [s, b, n, d], in another layout or packed [t, n, d], rotated; cos and sin [s, r/2] or [b, s, r/2]."""
    half = cos.shape[-1]
    if not half or not x.numel():
        return x.clone()
    # npu_rotary_mul takes one angle per channel, in four dimensions that broadcast against x.
    cos, sin = (
        t.repeat_interleave(2, dim=-1) if interleaved else torch.cat((t, t), dim=-1)
        for t in (cos.detach(), sin.detach())
    )
    # The dimension of the heads, over which the angles broadcast.
    heads = {"SBND": 2, "BSND": 2, "BNSD": 1, "TND": 2}[layout]
    if layout == "TND":
        x = x[None]
    if layout == "SBND":
        cos, sin = (t.transpose(0, 1) if t.ndim == 3 else t[:, None] for t in (cos, sin))
    else:
        cos, sin = (t if t.ndim == 3 else t[None] for t in (cos, sin))
    cos, sin = (t.unsqueeze(heads).contiguous() for t in (cos, sin))
    rotated = x[..., : 2 * half].float().contiguous()
    y = torch.ops.npu.npu_rotary_mul(rotated, cos, sin, "interleave" if interleaved else "half").to(x.dtype)
    y = torch.cat((y, x[..., 2 * half :]), dim=-1)
    return y[0] if layout == "TND" else y


def _rotary_bwd(residuals: tuple[Tensor, Tensor, str, bool], dy: Tensor) -> tuple[Tensor]:
    """dx from dy like x: the rotation by the negative angles, whose sine is -sin."""
    cos, sin, layout, interleaved = residuals
    return (_rotate(dy, cos, -sin, layout, interleaved),)


@Npu.impl(ops.rotary, id="npu/rotary_mul", why_not=_why_not, bwd=_rotary_bwd)
def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "SBND", interleaved: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor, str, bool]]:
    return _rotate(x, cos, sin, layout, interleaved), (cos, sin, layout, interleaved)
