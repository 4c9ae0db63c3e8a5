"""rotary (kernels/rotary.c). All layouts are passed as strides; x is copied only if its channels are not adjacent."""

from __future__ import annotations

from torch import Tensor

from hal import address, ops
from hal.backend_tools import angle_strides, rotary_from

from .build import lib
from .device import CpuRef
from .memory import empty
from .tensors import CODE, REAL, parameter, refuses


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, interleaved: bool, sign: float) -> Tensor:
    """x [s, b, n, d], in another layout or packed [t, n, d], rotated; cos and sin [s, r/2] or [b, s, r/2]."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    # TND has two row dimensions and the kernel three: the first one gets size 1.
    rows = x if x.ndim == 4 else x[None]
    real = REAL[x.dtype]
    cos, sin = parameter(cos, real), parameter(sin, real)
    y = empty(x.shape, x.dtype)
    if x.numel():
        lib().hal_rotary(
            CODE[x.dtype],
            interleaved,
            sign,
            x.data_ptr() or address(x),
            cos.data_ptr() or address(cos),
            sin.data_ptr() or address(sin),
            y.data_ptr() or address(y),
            *rows.shape,
            cos.shape[-1],
            *rows.stride()[:3],
            *angle_strides(layout, cos),
        )
    return y


rotary, _backward = rotary_from(_rotate)
CpuRef.impl(ops.rotary, id="cpu_ref/c", why_not=refuses(ops.rotary, "x", "cos", "sin"), bwd=_backward)(rotary)
