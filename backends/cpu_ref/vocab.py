"""cross_entropy (kernels/cross_entropy.c) and embedding, over a vocabulary that may be sharded across a Comm.

The logits are read in their own dtype, once per pass; ranks exchange only a few numbers per token. The backward pass of
cross_entropy needs no communication, because every rank has the maximum and the sum of exponentials of complete rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import Comm, address, ops
from hal.backend_tools import cross_entropy_from, rows_of, sharded_embedding, sharded_embedding_gradient

from .build import lib_for
from .device import CpuRef
from .memory import empty_like
from .tensors import CODE, REAL, addresses, refuses


def statistics(logits: Tensor, target: Tensor, stats: Tensor, smoothing: float, vocab_start: int) -> None:
    """Writes stats [4, rows] of the classes from vocab_start on, whose logits [..., v] these are, all contiguous: the
    maximum, the sum of exponentials relative to it, the target's logit (0 if it is another class), and, if smoothing,
    the sum of the logits relative to the maximum.
    """
    lib_for(logits.dtype).hal_cross_entropy_stats(
        CODE[logits.dtype],
        logits.data_ptr() or address(logits),
        target.data_ptr() or address(target),
        stats.data_ptr() or address(stats),
        smoothing != 0.0,
        rows_of(logits),
        logits.shape[-1],
        vocab_start,
    )


def combine(stats: Tensor, counts: Tensor) -> Tensor:
    """The `statistics` [4, rows] of all classes together, from those of parts [parts, 4, rows] of counts [parts]
    classes."""
    top = stats[:, 0].amax(0)
    shift = stats[:, 0] - top
    sum_exp = (stats[:, 1] * torch.exp(shift)).sum(0)
    return torch.stack((top, sum_exp, stats[:, 2].sum(0), (stats[:, 3] + counts[:, None] * shift).sum(0)))


def loss_of(stats: Tensor, smoothing: float, v_local: int, classes: int, comm: Comm | None) -> tuple[Tensor, Tensor]:
    """loss [rows] and {maximum, sum of exponentials} [2, rows] from this rank's `statistics` of v_local classes."""
    if comm is None:
        top, sums = stats[0], stats[1:]
    else:
        # Two collectives: the sums can only be rescaled once the maximum of all ranks is known.
        top = comm.all_reduce(stats[0], "max")
        stats[1] *= torch.exp(stats[0] - top)
        stats[3] += v_local * (stats[0] - top)  # a rank's sum of logits is relative to its own maximum
        sums = comm.all_reduce(stats[1:] if smoothing else stats[1:3])
    # (top - sums[1]) is formed first: it is nearly exact, and top + log_sum would lose the low bits of log_sum.
    log_sum = sums[0].log()
    loss = (1.0 - smoothing) * (top - sums[1] + log_sum)
    if smoothing:
        loss += smoothing * (log_sum - sums[2] / classes)
    return loss, torch.stack((top, sums[0]))


def _cross_entropy_fwd(
    logits: Tensor, target: Tensor, smoothing: float, vocab_start: int, classes: int, comm: Comm | None
) -> tuple[Tensor, Tensor]:
    """loss [...] and {maximum, sum of exponentials} [2, rows], for logits [..., v_local] and target [...]."""
    if comm is not None:
        stats = torch.zeros(4, rows_of(logits), dtype=REAL[logits.dtype])
        statistics(logits, target, stats, smoothing, vocab_start)
        loss, sums = loss_of(stats, smoothing, logits.shape[-1], classes, comm)
        return loss.view(target.shape), sums
    loss = torch.empty(target.shape, dtype=REAL[logits.dtype])
    sums = torch.empty(2, target.numel(), dtype=loss.dtype)
    if logits.numel():
        lib_for(logits.dtype).hal_cross_entropy_fwd(
            CODE[logits.dtype],
            *addresses(logits, target, loss, sums),
            smoothing,
            rows_of(logits),
            logits.shape[-1],
            vocab_start,
        )
    return loss, sums


def cross_entropy_bwd(
    logits: Tensor,
    target: Tensor,
    sums: Tensor,
    dloss: Tensor,
    dlogits: Tensor,
    smoothing: float,
    vocab_start: int,
    classes: int,
) -> None:
    """Writes dlogits [..., v_local], which may be the memory of logits; dloss and target are [...]."""
    lib_for(logits.dtype).hal_cross_entropy_bwd(
        CODE[logits.dtype],
        *addresses(logits, target, sums, dloss, dlogits),
        smoothing,
        rows_of(logits),
        logits.shape[-1],
        vocab_start,
        classes,
    )


cross_entropy, _bwd = cross_entropy_from(_cross_entropy_fwd, cross_entropy_bwd, empty_like)
CpuRef.impl(ops.cross_entropy, id="cpu_ref/c", why_not=refuses(ops.cross_entropy), bwd=_bwd)(cross_entropy)


def _embedding_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    """dweight [v_local, h] from dy [..., h]."""
    # A row of the table may receive thousands of terms, whose sum would stagnate in 16 bits.
    return sharded_embedding_gradient(residuals, dy.to(REAL[dy.dtype]))


CpuRef.impl(ops.embedding, id="cpu_ref/torch", why_not=refuses(ops.embedding), bwd=_embedding_bwd)(sharded_embedding)
