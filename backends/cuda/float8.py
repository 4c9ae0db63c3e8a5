"""scaled_linear by torch._scaled_mm, which calls cuBLASLt, or CUTLASS for scales per row.

Scales per block are left to the composition: torch takes them in layouts that depend on the version of CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import Call, ops

from . import launch
from .device import Cuda
from .tensors import different_devices

_MULTIPLE = 16
"""Of the sizes of the weight: 16 bytes, which cuBLASLt reads at a time."""


def _why_not(call: Call) -> Sequence[str]:
    x, weight, scales = call.x, call.weight, (call.x_scale, call.weight_scale)
    reasons = different_devices((x, weight, *scales))
    for t in (x, weight, *scales):
        if not t.is_meta and t.device.type != launch.device_type():
            reasons.append(f"a tensor on {t.device} (this backend's tensors are on {launch.device_type()})")
    if weight.shape[0] % _MULTIPLE or weight.shape[1] % _MULTIPLE or not x.numel() or not weight.numel():
        reasons.append("a weight whose sizes are not multiples of 16, or no rows (torch._scaled_mm takes neither)")
    if x.dtype == weight.dtype == torch.float8_e5m2:
        reasons.append("x and weight in float8_e5m2 (cuBLASLt multiplies it by float8_e4m3fn only)")
    per_row = tuple(tuple(s.shape) for s in scales) == ((*x.shape[:-1], 1), (weight.shape[0], 1))
    if any(s.ndim for s in scales) and not per_row:
        reasons.append("scales of blocks, or of two kinds (torch._scaled_mm runs here with both per tensor or per row)")
    if per_row and (call.dtype != torch.bfloat16 or weight.dtype != torch.float8_e4m3fn):
        reasons.append("scales per row with another result than bfloat16, or another weight than float8_e4m3fn")
    if not launch.simulated() and not x.is_meta and torch.cuda.get_device_capability(x.device) < (8, 9):
        reasons.append("a GPU without float8 products (they need compute capability 8.9)")
    return list(dict.fromkeys(reasons))


@Cuda.impl(ops.scaled_linear, id="cuda/torch", why_not=_why_not)
def scaled_linear(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    # [rows, 1] and [1, out], each contiguous, or two scales without dimensions.
    a_scale, b_scale = x_scale.detach(), weight_scale.detach()
    if a_scale.ndim:
        a_scale, b_scale = a_scale.reshape(-1, 1).contiguous(), b_scale.reshape(1, -1).contiguous()
    # use_fast_accum=False adds partial sums of 128 products in float32.
    y = torch._scaled_mm(rows, weight.detach().contiguous().t(), a_scale, b_scale, out_dtype=dtype)
    return y.view(*x.shape[:-1], weight.shape[0])
