"""scaled_linear: float8 tensors are converted to float32 with their scales (kernels/float8.c), then multiplied.

The kernels have no float8 multiplication. Conversion reads and writes 5 bytes per element, which costs little compared
with the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hal
from hal import Call, address, ops
from hal.backend_tools import host_tensor_reasons

from .build import lib
from .device import CpuRef
from .linear import product
from .memory import empty

_BLOCK = 128
"""Adjacent elements that share a scale if scales are by block."""

_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)
_reasons = host_tensor_reasons(_DTYPES, "the kernel reads float8 and float32", "cpu_ref takes CPU tensors")


@hal.by_metadata
def _why_not(call: Call) -> Sequence[str]:
    return _reasons(call.x, call.weight, call.x_scale, call.weight_scale)


def _dequantized(x: Tensor, scale: Tensor) -> Tensor:
    """x [..., n] times scale, float32 [rows, n].

    scale: [], [..., 1], [..., ceil(n / 128)] or [ceil(rows / 128), ceil(n / 128)].
    """
    rows = x.detach().reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    out = empty(rows.shape, torch.float32)
    if out.numel():
        rows, scale = rows.contiguous(), scale.detach().contiguous()
        column_scales = scale.shape[-1] if scale.ndim else 1
        row_scales = scale.numel() // column_scales
        lib().hal_dequantize(
            rows.dtype == torch.float8_e5m2,
            rows.data_ptr() or address(rows),
            scale.data_ptr() or address(scale),
            out.data_ptr() or address(out),
            *rows.shape,
            {1: rows.shape[0], rows.shape[0]: 1}.get(row_scales, _BLOCK),
            rows.shape[1] if column_scales == 1 else _BLOCK,
        )
    return out


@CpuRef.impl(ops.scaled_linear, id="cpu_ref/c", why_not=_why_not)
def scaled_linear(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    y = product(_dequantized(x, x_scale), _dequantized(weight, weight_scale))
    return y.to(dtype).view(*x.shape[:-1], weight.shape[0])
