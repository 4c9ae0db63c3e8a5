"""cross_entropy (kernels/cross_entropy.c) and embedding, over a vocabulary that may be sharded across a Comm.

The logits are read in their own dtype, once per pass; between ranks travel a few numbers per token. The backward pass
of cross_entropy needs no communication: every rank knows the maximum and the sum of exponentials of whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Comm, address, ops

from .build import lib
from .device import CpuRef
from .memory import empty_like
from .tensors import CODE, REAL, reasons, rows_of


@hal.by_metadata
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


def _sharded(
    logits: Tensor, target: Tensor, smoothing: float, vocab_start: int, v: int, comm: Comm
) -> tuple[Tensor, Tensor]:
    """loss [rows] and {maximum, sum of exponentials} [2, rows] from the ranks' statistics."""
    rows = rows_of(logits)
    stats = torch.zeros(4, rows, dtype=REAL[logits.dtype])
    lib().hal_cross_entropy_stats(
        CODE[logits.dtype],
        logits.data_ptr() or address(logits),
        target.data_ptr() or address(target),
        stats.data_ptr() or address(stats),
        smoothing != 0.0,
        rows,
        logits.shape[-1],
        vocab_start,
    )
    top = comm.all_reduce(stats[0], "max")
    stats[1] *= torch.exp(stats[0] - top)
    stats[3] += logits.shape[-1] * (stats[0] - top)  # each rank's sum is relative to its own maximum
    sums = comm.all_reduce(stats[1:] if smoothing else stats[1:3])
    log_sum = sums[0].log()
    loss = (1.0 - smoothing) * (top - sums[1] + log_sum)
    if smoothing:
        loss += smoothing * (log_sum - sums[2] / v)
    return loss, torch.stack((top, sums[0]))


def _cross_entropy_bwd(residuals: tuple[Any, ...], dloss: Tensor) -> tuple[Tensor]:
    logits, target, sums, smoothing, vocab_start, v, inplace = residuals
    dlogits = logits if inplace else empty_like(logits)
    if logits.numel():
        dloss = dloss.contiguous()
        lib().hal_cross_entropy_bwd(
            CODE[logits.dtype],
            logits.data_ptr() or address(logits),
            target.data_ptr() or address(target),
            sums.data_ptr() or address(sums),
            dloss.data_ptr() or address(dloss),
            dlogits.data_ptr() or address(dlogits),
            smoothing,
            rows_of(logits),
            logits.shape[-1],
            vocab_start,
            v,
        )
    if inplace:
        torch.autograd.graph.increment_version(logits)  # whoever needs their values learns that they are gone
    return (dlogits,)


@CpuRef.impl(ops.cross_entropy, id="cpu_ref/c", why_not=_why_not_cross_entropy, bwd=_cross_entropy_bwd)
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
    v = logits.shape[-1] * (comm.size if comm is not None else 1)
    smoothing = label_smoothing * v / (v - 1) if label_smoothing else 0.0
    if comm is not None and comm.size > 1:
        flat_loss, sums = _sharded(logits, target, smoothing, vocab_start, v, comm)
        loss = flat_loss.view(target.shape)
    else:
        loss = torch.empty(target.shape, dtype=REAL[logits.dtype])
        sums = torch.empty(2, target.numel(), dtype=loss.dtype)
        if logits.numel():
            lib().hal_cross_entropy_fwd(
                CODE[logits.dtype],
                logits.data_ptr() or address(logits),
                target.data_ptr() or address(target),
                loss.data_ptr() or address(loss),
                sums.data_ptr() or address(sums),
                smoothing,
                rows_of(logits),
                logits.shape[-1],
                vocab_start,
            )
    return loss, (logits, target, sums, smoothing, vocab_start, v, inplace_backward)


@hal.by_metadata
def _why_not_embedding(weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None) -> Sequence[str]:
    return reasons(weight)


def _embedding_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    rows, absent, v_local, dtype = residuals
    dy = dy.to(REAL[dtype])  # a row may be hit thousands of times: 16-bit sums would stop growing
    if absent is not None:
        dy = dy.masked_fill(absent[..., None], 0.0)
    return (torch.ops.aten.embedding_dense_backward.default(dy, rows, v_local, -1, False).to(dtype),)


@CpuRef.impl(ops.embedding, id="cpu_ref/torch", why_not=_why_not_embedding, bwd=_embedding_bwd)
def embedding(
    weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None
) -> tuple[Tensor, tuple[Any, ...]]:
    absent, rows = None, ids
    if comm is not None and comm.size > 1:
        rows = ids - vocab_start
        absent = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill(absent, 0)
    y = torch.nn.functional.embedding(rows, weight)
    if comm is not None and absent is not None:
        y = comm.all_reduce(y.masked_fill_(absent[..., None], 0.0))
    return y, (rows, absent, weight.shape[0], weight.dtype)
