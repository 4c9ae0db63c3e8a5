"""layer_norm and rms_norm (kernels/norm.cu). The rows' statistics are saved for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.backend_tools import rows_of

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, column_sum, refuses, threads_for, threads_of_row


def _parameters(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias [width], contiguous and of one dtype (float32 if theirs differ)."""
    if bias is not None and bias.dtype != weight.dtype:
        weight, bias = weight.float(), bias.float()
    return weight.contiguous(), None if bias is None else bias.contiguous()


def _vectors(width: int, *tensors: Tensor | None) -> bool:
    """Whether all tensors start on 16-byte boundaries, and so do all rows of `width` elements of the first tensor."""
    assert tensors[0] is not None
    return aligned(*tensors) and width % LANES[tensors[0].dtype] == 0


def _threads(width: int, vec: bool, dtype: torch.dtype) -> int:
    """Threads of a block that processes a row of `width` elements."""
    return threads_of_row(width, LANES[dtype] if vec else 1)


def _held(width: int, vec: bool, dtype: torch.dtype, vectors: int) -> bool:
    """Whether the threads of a block hold a row in registers, `vectors` of 16 bytes each."""
    return vec and width <= vectors * LANES[dtype] * launch.MAX_THREADS


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """y, and the statistics [1 or 2, rows]: (mean and) 1 / standard deviation. x [..., width] is contiguous."""
    rows, width = rows_of(x), x.shape[-1]
    y, stats = torch.empty_like(x), torch.empty(1 + centered, rows, dtype=torch.float32, device=x.device)
    if not x.numel():
        return y, stats
    w, b = _parameters(weight, bias)
    vec = _vectors(width, x, y, w, b)
    types = f"{TYPE[x.dtype]}, {TYPE[w.dtype]}, {'true' if centered else 'false'}"
    # One block per row; the kernel iterates, because a grid has at most 2^31 - 1 blocks.
    grid, threads = (launch.blocks(rows), 1), _threads(width, vec, x.dtype)
    parameters = (x, w, b, y, stats, stats[-1], eps, rows, width)
    if _held(width, vec, x.dtype, 4):
        launch.run(f"norm_fwd_held<{types}>", grid, threads, *parameters)
    else:
        launch.run(f"norm_fwd<{types}>", grid, threads, *parameters, int(vec))
    return y, stats


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx like x, dweight and dbias [width] (None without a bias), from dy like x."""
    rows, width, sums = rows_of(x), x.shape[-1], 1 if bias is None else 2
    dx, dy = torch.empty_like(x), dy.contiguous()
    w, _ = _parameters(weight, bias)
    grads = torch.empty(sums, width, dtype=w.dtype, device=x.device)
    if not x.numel():
        grads.zero_()
    elif held := next((n for n in (2, 4) if _held(width, _vectors(width, x, w, dx, dy), x.dtype, n)), 0):
        threads = threads_for(-(-width // (held * LANES[x.dtype])))
        # As many blocks as are resident with the registers that the kernel is compiled for: 512 or 256 threads.
        blocks = launch.blocks(rows, launch.multiprocessors() * ((1024 // held) // threads))
        partial = torch.empty(blocks, sums, width, dtype=torch.float32, device=x.device)
        launch.run(
            f"norm_bwd_held<{TYPE[x.dtype]}, {TYPE[w.dtype]}, {'false' if bias is None else 'true'}, {held}>",
            (blocks, 1),
            threads,
            x,
            w,
            stats,
            stats[-1],
            dy,
            dx,
            partial,
            rows,
            width,
        )
        column_sum(partial, blocks, grads)
    else:
        vec = _vectors(width, x, w, dx, dy)
        # A few blocks per multiprocessor hide latency; more blocks only add partial sums. On an H100, 5 and 6 are 2 %
        # faster than 4, and 8 are 15 % slower.
        blocks = launch.blocks(rows, launch.multiprocessors() * 5)
        partial = torch.empty(blocks, sums, width, dtype=torch.float32, device=x.device)
        shared = sums * width * 4
        # 112 KB on sm_90: layer norms of up to 14,336 columns.
        in_shared = shared <= launch.shared_memory()
        launch.run(
            f"norm_bwd<{TYPE[x.dtype]}, {TYPE[w.dtype]}, {'false' if bias is None else 'true'}>",
            (blocks, 1),
            _threads(width, vec, x.dtype),
            x,
            w,
            stats,
            stats[-1],
            dy,
            dx,
            partial,
            rows,
            width,
            int(vec),
            int(in_shared),
            shared=shared if in_shared else 0,
        )
        column_sum(partial, blocks, grads)
    dbias = None if bias is None else grads[1].to(bias.dtype)
    return dx, grads[0].to(weight.dtype), dbias


def _layer_norm_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x [..., h], weight [h] and bias [h] for dy [..., h]."""
    x, weight, bias, stats = residuals
    return _backward(x, weight, bias, stats, dy)


@Cuda.impl(ops.layer_norm, id="cuda/kernel", why_not=refuses(ops.layer_norm), bwd=_layer_norm_bwd)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    y, stats = _forward(x, weight, bias, eps, True)
    return y, (x, weight, bias, stats)


def _rms_norm_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x [..., h] and weight [h] for dy [..., h]."""
    x, weight, stats = residuals
    return _backward(x, weight, None, stats, dy)[:2]


@Cuda.impl(ops.rms_norm, id="cuda/kernel", why_not=refuses(ops.rms_norm), bwd=_rms_norm_bwd)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    y, stats = _forward(x, weight, None, eps, False)
    return y, (x, weight, stats)
