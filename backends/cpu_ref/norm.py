"""layer_norm and rms_norm (kernels/norm.c). The rows' statistics are saved for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import address, ops
from hal.backend_tools import rows_of

from .build import lib_for
from .device import CpuRef
from .memory import empty_like
from .tensors import CODE, REAL, parameter, refuses


def _backward(residuals: tuple[Tensor, Tensor, Tensor | None, Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """dx like x, dweight [width] and, if there is a bias, dbias [width], from dy like x. stats: see _forward."""
    x, weight, bias, stats = residuals
    real, dy = stats.dtype, dy.contiguous()
    w, dx, dw = parameter(weight, real), empty_like(x), torch.empty(x.shape[-1], dtype=real)
    db = None if bias is None else torch.empty_like(dw)
    mean, rstd = 0, stats.data_ptr() or address(stats)
    if db is not None:  # stats is contiguous, so the reciprocal standard deviations follow the means
        mean, rstd = rstd, rstd + stats.shape[1] * stats.element_size()
    lib_for(x.dtype).hal_norm_bwd(
        CODE[x.dtype],
        db is not None,
        x.data_ptr() or address(x),
        w.data_ptr() or address(w),
        mean,
        rstd,
        dy.data_ptr() or address(dy),
        dx.data_ptr() or address(dx),
        dw.data_ptr() or address(dw),
        0 if db is None else db.data_ptr() or address(db),
        rows_of(x),
        x.shape[-1],
    )
    if weight.dtype is not real:
        dw = dw.to(weight.dtype)
    if bias is None or db is None:
        return dx, dw
    return dx, dw, db if bias.dtype is real else db.to(bias.dtype)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> tuple[Tensor, tuple[Any, ...]]:
    """y like x, and residuals. With a bias, the norm is layer_norm and stats is [2, rows]: mean and 1 / standard
    deviation. Without one it is rms_norm, and stats is [rows]: 1 / root mean square."""
    real, x, rows = REAL[x.dtype], x.contiguous(), rows_of(x)
    w, b = parameter(weight, real), None if bias is None else parameter(bias, real)
    y, stats = empty_like(x), torch.empty(rows if b is None else (2, rows), dtype=real)
    mean, rstd = 0, stats.data_ptr() or address(stats)
    if b is not None:
        mean, rstd = rstd, rstd + rows * stats.element_size()
    lib_for(x.dtype).hal_norm_fwd(
        CODE[x.dtype],
        b is not None,
        x.data_ptr() or address(x),
        w.data_ptr() or address(w),
        0 if b is None else b.data_ptr() or address(b),
        y.data_ptr() or address(y),
        mean,
        rstd,
        eps,
        rows,
        x.shape[-1],
    )
    return y, (x, weight, bias, stats)


CpuRef.impl(ops.layer_norm, id="cpu_ref/c", why_not=refuses(ops.layer_norm), bwd=_backward)(_forward)


@CpuRef.impl(ops.rms_norm, id="cpu_ref/c", why_not=refuses(ops.rms_norm), bwd=_backward)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Any, ...]]:
    return _forward(x, weight, None, eps)
