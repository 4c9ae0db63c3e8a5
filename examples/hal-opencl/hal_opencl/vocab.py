"""cross_entropy and embedding (kernels/vocab.cl), over a vocabulary that may be sharded across a Comm.

Ranks exchange four numbers per token; the backward pass of cross_entropy needs no communication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import Comm, ops
from hal.backend_tools import cross_entropy_from

from .device import OpenCL
from .engine import engine
from .memory import KernelCall, Out
from .tensors import blocks, refuses, rows_of


def _cross_entropy_bwd(
    logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, dlogits: Tensor, smoothing: float, start: int, v: int
) -> None:
    """Writes dlogits [..., v_local], which may be the memory of logits; dloss and target are [...]."""
    rows, width = rows_of(logits), logits.shape[-1]
    with KernelCall() as call:
        call.run(
            *("vocab", "cross_entropy_bwd", {"T": logits.dtype}, (rows,), logits, target, lse, dloss),
            *(Out(dlogits), smoothing, start, rows, width, v),
        )


def _cross_entropy_fwd(
    logits: Tensor, target: Tensor, smoothing: float, vocab_start: int, classes: int, comm: Comm | None
) -> tuple[Tensor, Tensor]:
    """loss [...] and {maximum, log of the sum of exponentials} [2, rows], for logits [..., v_local]."""
    rows, width = rows_of(logits), logits.shape[-1]
    loss, lse = torch.empty(target.shape), torch.empty(2, rows)
    if not rows:
        return loss, lse
    types, stats = {"T": logits.dtype}, torch.empty(4, rows)
    with KernelCall() as call:
        shape = (vocab_start, rows, width)
        call.run("vocab", "cross_entropy_stats", types, (rows,), logits, target, Out(stats), *shape)
    grid = (-(-rows // engine().group),)
    # Two collectives: the sums can only be rescaled once the maximum of all ranks is known.
    if comm is not None:
        top = comm.all_reduce(stats[0], "max")
        with KernelCall() as call:
            call.run("vocab", "cross_entropy_rescale", types, grid, Out(stats, update=True), top, target, *shape)
        stats[1:] = comm.all_reduce(stats[1:])
    with KernelCall() as call:
        call.run("vocab", "cross_entropy_loss", types, grid, stats, Out(loss), Out(lse), smoothing, rows, classes)
    return loss, lse


cross_entropy, _bwd = cross_entropy_from(_cross_entropy_fwd, _cross_entropy_bwd)
OpenCL.impl(ops.cross_entropy, id="opencl/cl", why_not=refuses(ops.cross_entropy), bwd=_bwd)(cross_entropy)


def _embedding_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    """dweight [v_local, h] from dy [..., h]; every work-item sums its columns over all tokens in order."""
    ids, vocab_start, shape = residuals
    dweight = torch.zeros(shape, dtype=dy.dtype)
    if dy.numel():
        with KernelCall() as call:
            call.run(
                *("vocab", "embedding_bwd", {"T": dy.dtype}, (blocks(shape[1]),), dy.contiguous(), ids),
                *(call.scratch(shape[0] * shape[1]), Out(dweight), vocab_start, ids.numel(), *shape),
            )
    return (dweight,)


@OpenCL.impl(ops.embedding, id="opencl/cl", why_not=refuses(ops.embedding), bwd=_embedding_bwd)
def embedding(
    weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None
) -> tuple[Tensor, tuple[Any, ...]]:
    ids, sharded = ids.contiguous(), comm is not None and comm.size > 1
    y = torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype)
    # The kernel returns zeros for ids outside the table, as required for a shard. Without sharding this is an error.
    if not sharded and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= weight.shape[0]:
            raise IndexError(f"embedding: ids from {low} to {high} in a table of {weight.shape[0]} rows")
    if y.numel():
        with KernelCall() as call:
            call.run(
                *("vocab", "embedding_fwd", {"T": weight.dtype}, (ids.numel(),), weight.contiguous(), ids, Out(y)),
                *(vocab_start, *weight.shape),
            )
    if sharded:
        assert comm is not None
        y = comm.all_reduce(y)
    return y, (ids, vocab_start, tuple(weight.shape))
