"""scale_mask_softmax (kernels/softmax.cu). The mask is read through its strides, never expanded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.backend_tools import rows_of

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, refuses, threads_of_row


def _mask(mask: Tensor | None, shape: torch.Size) -> launch.Struct:
    """struct Mask of softmax.cu; the bytes of a bool tensor are 0 and 1."""
    if mask is None:
        return launch.Struct("=5q", None, 0, 0, 0, 0)
    mask = mask.expand(shape)  # a view: broadcast dimensions get stride 0
    return launch.Struct("=5q", mask, *mask.stride())


def _launch(kernel: str, x: Tensor, others: tuple[Tensor, ...], stats: Tensor, mask: Tensor | None, *how: Any) -> None:
    """Launches `kernel`, one block per row, on x and others [b, n, sq, sk]; how: its scalar parameters."""
    # One block per row; the kernel iterates, because a grid has at most 2^31 - 1 blocks.
    rows, (_, heads, sq, sk) = rows_of(x), x.shape
    vec = aligned(x, *others)
    launch.run(
        f"{kernel}<{TYPE[x.dtype]}>",
        (launch.blocks(rows), 1),
        threads_of_row(sk, LANES[x.dtype] if vec else 1),
        x,
        *others,
        stats,
        *how,
        rows,
        heads,
        sq,
        sk,
        _mask(mask, x.shape),
        int(vec),
    )


def softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """y, and the rows' statistics [2, rows]: maximum of scale x and 1 / sum (both 0 for a row without a visible
    column)."""
    y, stats = torch.empty_like(x), torch.empty(2, rows_of(x), dtype=torch.float32, device=x.device)
    if x.numel():
        _launch("softmax_fwd", x, (y,), stats, mask, float(scale), int(causal))
    return y, stats


def softmax_backward(x: Tensor, dy: Tensor, mask: Tensor | None, stats: Tensor, scale: float, causal: bool) -> Tensor:
    """dx [b, n, sq, sk]; x is the contiguous input of the forward pass."""
    dy, dx = dy.contiguous(), torch.empty_like(x)
    if x.numel():
        _launch("softmax_bwd", x, (dy, dx), stats, mask, float(scale), int(causal))
    return dx


def _backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    """dx [b, n, sq, sk] from dy of the same shape."""
    x, mask, stats, scale, causal = residuals
    return (softmax_backward(x, dy, mask, stats, scale, causal),)


@Cuda.impl(ops.scale_mask_softmax, id="cuda/kernel", why_not=refuses(ops.scale_mask_softmax), bwd=_backward)
def scale_mask_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    x = x.contiguous()
    y, stats = softmax_forward(x, mask, scale, causal)
    return y, (x, mask, stats, scale, causal)
