"""cross_entropy and embedding (kernels/vocab.cl), over a vocabulary that may be sharded across a Comm.

Between ranks travel four numbers per token; the backward pass of cross_entropy needs no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Comm, ops

from .device import OpenCL
from .engine import engine
from .memory import Call, Out
from .tensors import blocks, reasons, rows_of


def _why_not_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    vocab_start: int = 0,
    comm: Comm | None = None,
    inplace_backward: bool = False,
) -> Sequence[str]:
    return reasons(logits)


def _cross_entropy_bwd(residuals: tuple[Any, ...], dloss: Tensor) -> tuple[Tensor]:
    logits, target, lse, smoothing, vocab_start, v, inplace = residuals
    dlogits = logits if inplace else torch.empty_like(logits)
    if logits.numel():
        rows, width = rows_of(logits), logits.shape[-1]
        with Call() as call:
            call.run(
                *("vocab", "cross_entropy_bwd", {"T": logits.dtype}, (rows,), logits, target, lse, dloss.contiguous()),
                *(Out(dlogits), smoothing, vocab_start, rows, width, v),
            )
    if inplace:
        torch.autograd.graph.increment_version(logits)  # whoever needs their values learns that they are gone
    return (dlogits,)


@OpenCL.impl(ops.cross_entropy, id="opencl/cl", why_not=_why_not_cross_entropy, bwd=_cross_entropy_bwd)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    vocab_start: int = 0,
    comm: Comm | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, tuple[Any, ...]]:
    logits, target = logits.contiguous(), target.contiguous()
    rows, width = rows_of(logits), logits.shape[-1]
    sharded = comm is not None and comm.size > 1
    v = width * (comm.size if comm is not None else 1)
    smoothing = label_smoothing * v / (v - 1) if label_smoothing else 0.0
    loss, lse = torch.empty(target.shape), torch.empty(2, rows)
    residuals = (logits, target, lse, smoothing, vocab_start, v, inplace_backward)
    if not rows:
        return loss, residuals
    types, stats = {"T": logits.dtype}, torch.empty(4, rows)
    with Call() as call:
        shape = (vocab_start, rows, width)
        call.run("vocab", "cross_entropy_stats", types, (rows,), logits, target, Out(stats), *shape)
    grid = (-(-rows // engine().group),)
    if sharded:
        assert comm is not None
        top = comm.all_reduce(stats[0], "max")
        with Call() as call:
            call.run("vocab", "cross_entropy_rescale", types, grid, Out(stats, update=True), top, target, *shape)
        stats[1:] = comm.all_reduce(stats[1:])
    with Call() as call:
        call.run("vocab", "cross_entropy_loss", types, grid, stats, Out(loss), Out(lse), smoothing, rows, v)
    return loss, residuals


def _why_not_embedding(weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None) -> Sequence[str]:
    return reasons(weight)


def _embedding_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    ids, vocab_start, shape = residuals
    dweight = torch.zeros(shape, dtype=dy.dtype)
    if dy.numel():
        with Call() as call:
            call.run(
                *("vocab", "embedding_bwd", {"T": dy.dtype}, (blocks(shape[1]),), dy.contiguous(), ids),
                *(call.scratch(shape[0] * shape[1]), Out(dweight), vocab_start, ids.numel(), *shape),
            )
    return (dweight,)


@OpenCL.impl(ops.embedding, id="opencl/cl", why_not=_why_not_embedding, bwd=_embedding_bwd)
def embedding(
    weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None
) -> tuple[Tensor, tuple[Any, ...]]:
    ids, sharded = ids.contiguous(), comm is not None and comm.size > 1
    y = torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype)
    if not sharded and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= weight.shape[0]:
            raise IndexError(f"embedding: ids from {low} to {high} in a table of {weight.shape[0]} rows")
    if y.numel():
        with Call() as call:
            call.run(
                *("vocab", "embedding_fwd", {"T": weight.dtype}, (ids.numel(),), weight.contiguous(), ids, Out(y)),
                *(vocab_start, *weight.shape),
            )
    if sharded:
        assert comm is not None
        y = comm.all_reduce(y)
    return y, (ids, vocab_start, tuple(weight.shape))
