"""Collectives with gradients: what enters and leaves a tensor-parallel region.

Each pair is a collective and its conjugate in the backward pass (Shoeybi et al., "Megatron-LM", arXiv 1909.08053,
section 3). They exist once, above Comm, for every backend; inputs are never mutated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import Comm


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(dy.contiguous()), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def copy_to_region(x: Tensor, comm: Comm | None) -> Tensor:
    """Identity forward, sum of the ranks' gradients backward."""
    return x if comm is None or comm.size == 1 else _Copy.apply(x, comm)  # type: ignore[no-untyped-call]


def reduce_from_region(x: Tensor, comm: Comm | None) -> Tensor:
    """Sum over the ranks forward, identity backward."""
    return x if comm is None or comm.size == 1 else _Reduce.apply(x, comm)  # type: ignore[no-untyped-call]
