"""cross_entropy (kernels/cross_entropy.cu) and embedding, over a vocabulary that may be sharded across a Comm.

Ranks exchange four numbers per token. The backward pass of cross_entropy needs no communication, because every rank has
the log-sum-exp of the full vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal import Comm, ops
from hal.backend_tools import cross_entropy_from, rows_of, sharded_embedding, sharded_embedding_gradient

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, refuses, threads_for


def _across_ranks(stats: Tensor, comm: Comm) -> Tensor:
    """The statistics [4, rows] of complete rows from those of each rank's part of the rows."""
    # Two collectives: the sums can only be rescaled once the maximum of all ranks is known.
    top = comm.all_reduce(stats[0], "max")
    stats[1] *= torch.exp(stats[0] - top)
    return torch.cat((top[None], comm.all_reduce(stats[1:])))


def _threads(logits: Tensor, vec: bool) -> int:
    """Threads of a block that iterates over a row of logits."""
    return threads_for(-(-logits.shape[-1] // (LANES[logits.dtype] if vec else 1)))


def _cross_entropy_bwd(
    logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, dlogits: Tensor, smoothing: float, start: int, v: int
) -> None:
    """Writes dlogits [..., v_local], which may be the memory of logits; dloss and target are [...]."""
    rows, vec = rows_of(logits), aligned(logits, dlogits)
    launch.run(
        f"cross_entropy_bwd<{TYPE[logits.dtype]}>",
        (launch.blocks(rows), 1),
        _threads(logits, vec),
        logits,
        target,
        lse,
        dloss,
        dlogits,
        float(smoothing),
        rows,
        logits.shape[-1],
        start,
        v,
        int(vec),
    )


def _cross_entropy_fwd(
    logits: Tensor, target: Tensor, smoothing: float, vocab_start: int, classes: int, comm: Comm | None
) -> tuple[Tensor, Tensor]:
    """loss [...] and {maximum, log of the sum of exponentials} [2, rows], for logits [..., v_local]."""
    rows, width = rows_of(logits), logits.shape[-1]
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    lse = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    if logits.numel():
        stats, vec = torch.empty(4, rows, dtype=torch.float32, device=logits.device), aligned(logits)
        launch.run(
            f"cross_entropy_stats<{TYPE[logits.dtype]}>",
            (launch.blocks(rows), 1),
            _threads(logits, vec),
            logits,
            target,
            stats,
            rows,
            width,
            vocab_start,
            int(vec),
        )
        if comm is not None:
            stats = _across_ranks(stats, comm)
        grid = (launch.blocks(-(-rows // 256), 1024), 1)
        launch.run("cross_entropy_loss", grid, 256, stats, loss, lse, float(smoothing), rows, classes)
    return loss, lse


cross_entropy, _bwd = cross_entropy_from(_cross_entropy_fwd, _cross_entropy_bwd)
Cuda.impl(ops.cross_entropy, id="cuda/kernel", why_not=refuses(ops.cross_entropy), bwd=_bwd)(cross_entropy)


UNSORTED_IDS = 3072
"""Up to this many ids, torch's embedding_dense_backward adds to the gradient in its dtype, without sorting the ids."""


def _embedding_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    """dweight [v_local, h] from dy [..., h]."""
    # For more ids, torch's CUDA kernel sorts them and sums the rows of each id in float32. The kernel for few ids and
    # the CPU kernel round every partial sum to dy's dtype, so they are given float32.
    rows = residuals[0]
    wide = launch.simulated() or rows.numel() <= UNSORTED_IDS
    return sharded_embedding_gradient(residuals, dy.float() if wide else dy)


Cuda.impl(ops.embedding, id="cuda/torch", why_not=refuses(ops.embedding), bwd=_embedding_bwd)(sharded_embedding)
