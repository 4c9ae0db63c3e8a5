"""scale_mask_softmax: npu_scaled_masked_softmax where its documented limits allow, otherwise torch_npu's softmax.

The vendor's operator replaces masked scores by -10000, which makes a fully masked row uniform. HAL's masked entries are
exactly 0, so they are set to 0 afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Call, ops

from .constraints import CONSTRAINTS
from .device import Npu
from .tensors import reasons, refuses

_MULTIPLE = 32
_SIZES = CONSTRAINTS["softmax.size"]


def _why_not_vendor(call: Call) -> Sequence[str]:
    refusals = reasons(call.x)
    if call.mask is None and not call.causal:
        refusals.append("no mask (npu_scaled_masked_softmax needs one)")
    for name, size in (("query", call.x.shape[2]), ("key", call.x.shape[3])):
        if not _SIZES.least <= size <= _SIZES.most or size % _MULTIPLE:
            refusals.append(
                f"{size} {name} positions ({_SIZES.operator} takes multiples of {_MULTIPLE} "
                f"from {_SIZES.least} to {_SIZES.most})"
            )
    return refusals


def _masked(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Mask and causal limit in one tensor, in a shape that the operator broadcasts: [b or 1, n or 1, sq, sk]."""
    band = ops.band_mask(x.shape[2], x.shape[3], None, 0, x.device) if causal else None
    both = mask if band is None else band if mask is None else mask | band
    assert both is not None
    both = both.reshape((1,) * (4 - both.ndim) + tuple(both.shape))
    return both.expand(both.shape[0], both.shape[1], *x.shape[2:]).contiguous()


def _vendor_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    """dx [b, n, sq, sk] from dy of the same shape."""
    y, masked, scale, dtype = residuals
    dx = torch.ops.npu.npu_scaled_masked_softmax_backward(dy.contiguous().float(), y, masked, scale, False)
    return (dx.masked_fill(masked, 0.0).to(dtype),)


@Npu.impl(ops.scale_mask_softmax, id="npu/scaled_masked_softmax", why_not=_why_not_vendor, bwd=_vendor_bwd)
def scale_mask_softmax_vendor(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    masked = _masked(x, mask, causal)
    # In float32, because the backward pass uses the probabilities, and rounding them would reduce its accuracy.
    y = torch.ops.npu.npu_scaled_masked_softmax(x.contiguous().float(), masked, scale, False)
    y = y.masked_fill(masked, 0.0)
    return y.to(x.dtype), (y, masked, scale, x.dtype)


@Npu.impl(ops.scale_mask_softmax, id="npu/torch", why_not=refuses(ops.scale_mask_softmax))
def scale_mask_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False) -> Tensor:
    return ops.scale_mask_softmax.reference(x, mask, scale, causal)
