"""rotary (kernels/rotary.cl). All layouts are passed as strides; x is copied only if its channels are not adjacent."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal import ops
from hal.backend_tools import angle_strides, rotary_from

from .device import OpenCL
from .memory import KernelCall, Out
from .tensors import refuses


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, interleaved: bool, sign: float) -> Tensor:
    """x [s, b, n, d], in another layout or packed [t, n, d], rotated; cos and sin [s, r/2] or [b, s, r/2]."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    heads = x if x.ndim == 4 else x[None]
    y = torch.empty(x.shape, dtype=x.dtype)
    if x.numel():
        with KernelCall() as call:
            call.run(
                *("rotary", "rotary", {"T": x.dtype, "INTERLEAVED": int(interleaved)}, (math.prod(heads.shape[:3]),)),
                *(heads, cos.contiguous(), sin.contiguous(), Out(y), sign, *heads.shape[1:], cos.shape[-1]),
                *(*heads.stride()[:3], *angle_strides(layout, cos)),
            )
    return y


rotary, _backward = rotary_from(_rotate)
OpenCL.impl(ops.rotary, id="opencl/cl", why_not=refuses(ops.rotary, "x", "cos", "sin"), bwd=_backward)(rotary)
