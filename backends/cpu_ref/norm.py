"""layer_norm and rms_norm (kernels/norm.c). The rows' statistics are saved for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from hal import address, ops
from hal.backend_tools import rows_of

from .build import lib
from .device import CpuRef
from .memory import empty_like
from .tensors import CODE, REAL, parameter, refuses


def _layer_norm_bwd(residuals: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx like x, dweight and dbias [width], from dy like x. stats [2, rows]: mean and 1 / standard deviation."""
    x, weight, bias, stats = residuals
    real, dy, rows = stats.dtype, dy.contiguous(), rows_of(x)
    w, dx, grads = parameter(weight, real), empty_like(x), torch.empty(2, x.shape[-1], dtype=real)
    dw, db = grads.unbind()
    # stats is contiguous, so the reciprocal standard deviations follow the means.
    mean = stats.data_ptr() or address(stats)
    lib().hal_norm_bwd(
        CODE[x.dtype],
        1,
        x.data_ptr() or address(x),
        w.data_ptr() or address(w),
        mean,
        mean + rows * stats.element_size(),
        dy.data_ptr() or address(dy),
        dx.data_ptr() or address(dx),
        dw.data_ptr() or address(dw),
        db.data_ptr() or address(db),
        rows,
        x.shape[-1],
    )
    return dx, dw.to(weight.dtype), db.to(bias.dtype)


@CpuRef.impl(ops.layer_norm, id="cpu_ref/c", why_not=refuses(ops.layer_norm), bwd=_layer_norm_bwd)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Tensor, ...]]:
    real, x = REAL[x.dtype], x.contiguous()
    rows = rows_of(x)
    w, b = parameter(weight, real), parameter(bias, real)
    y, stats = empty_like(x), torch.empty(2, rows, dtype=real)
    mean = stats.data_ptr() or address(stats)
    lib().hal_norm_fwd(
        CODE[x.dtype],
        1,
        x.data_ptr() or address(x),
        w.data_ptr() or address(w),
        b.data_ptr() or address(b),
        y.data_ptr() or address(y),
        mean,
        mean + rows * stats.element_size(),
        eps,
        rows,
        x.shape[-1],
    )
    return y, (x, weight, bias, stats)


def _rms_norm_bwd(residuals: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, Tensor]:
    """dx like x and dweight [width], from dy like x. rstd [rows]: 1 / root mean square."""
    x, weight, rstd = residuals
    real, dy = rstd.dtype, dy.contiguous()
    w, dx, dw = parameter(weight, real), empty_like(x), torch.empty(x.shape[-1], dtype=real)
    lib().hal_norm_bwd(
        CODE[x.dtype],
        0,
        x.data_ptr() or address(x),
        w.data_ptr() or address(w),
        0,
        rstd.data_ptr() or address(rstd),
        dy.data_ptr() or address(dy),
        dx.data_ptr() or address(dx),
        dw.data_ptr() or address(dw),
        0,
        rows_of(x),
        x.shape[-1],
    )
    return dx, dw.to(weight.dtype)


@CpuRef.impl(ops.rms_norm, id="cpu_ref/c", why_not=refuses(ops.rms_norm), bwd=_rms_norm_bwd)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Tensor, ...]]:
    real, x = REAL[x.dtype], x.contiguous()
    rows = rows_of(x)
    w, y, rstd = parameter(weight, real), empty_like(x), torch.empty(rows, dtype=real)
    lib().hal_norm_fwd(
        CODE[x.dtype],
        0,
        x.data_ptr() or address(x),
        w.data_ptr() or address(w),
        0,
        y.data_ptr() or address(y),
        0,
        rstd.data_ptr() or address(rstd),
        eps,
        rows,
        x.shape[-1],
    )
    return y, (x, weight, rstd)
