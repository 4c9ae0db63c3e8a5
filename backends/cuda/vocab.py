"""cross_entropy (kernels/cross_entropy.cu) and embedding, over a vocabulary that may be sharded across a Comm.

Between ranks travel four numbers per token. The backward pass of cross_entropy needs no communication: every rank knows
the log-sum-exp of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import Comm, ops

from . import launch
from .device import Cuda
from .tensors import LANES, TYPE, aligned, reasons, rows_of, threads_for


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


def _across_ranks(stats: Tensor, comm: Comm) -> Tensor:
    """The statistics of whole rows from those of every rank's part."""
    top = comm.all_reduce(stats[0], "max")
    stats[1] *= torch.exp(stats[0] - top)
    return torch.cat((top[None], comm.all_reduce(stats[1:])))


def _threads(logits: Tensor, vec: bool) -> int:
    return threads_for(-(-logits.shape[-1] // (LANES[logits.dtype] if vec else 1)))


def _cross_entropy_bwd(residuals: tuple[Any, ...], dloss: Tensor) -> tuple[Tensor]:
    logits, target, lse, smoothing, vocab_start, classes, inplace = residuals
    dlogits, dloss = logits if inplace else torch.empty_like(logits), dloss.contiguous()
    if logits.numel():
        rows, vec = rows_of(logits), aligned(logits, dlogits)
        launch.run(
            f"cross_entropy_bwd<{TYPE[logits.dtype]}>",
            (min(rows, 1 << 30), 1),
            _threads(logits, vec),
            logits.data_ptr(),
            target.data_ptr(),
            lse.data_ptr(),
            dloss.data_ptr(),
            dlogits.data_ptr(),
            smoothing,
            rows,
            logits.shape[-1],
            vocab_start,
            classes,
            int(vec),
        )
    if inplace:
        torch.autograd.graph.increment_version(logits)  # whoever needs their values learns that they are gone
    return (dlogits,)


@Cuda.impl(ops.cross_entropy, id="cuda/kernel", why_not=_why_not_cross_entropy, bwd=_cross_entropy_bwd)
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
    classes = width * (comm.size if comm is not None else 1)
    smoothing = float(label_smoothing * classes / (classes - 1)) if label_smoothing else 0.0
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    lse = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    if logits.numel():
        stats, vec = torch.empty(4, rows, dtype=torch.float32, device=logits.device), aligned(logits)
        launch.run(
            f"cross_entropy_stats<{TYPE[logits.dtype]}>",
            (min(rows, 1 << 30), 1),
            _threads(logits, vec),
            logits.data_ptr(),
            target.data_ptr(),
            stats.data_ptr(),
            rows,
            width,
            vocab_start,
            int(vec),
        )
        if comm is not None and comm.size > 1:
            stats = _across_ranks(stats, comm)
        grid = (min(-(-rows // 256), 1024), 1)
        launch.run(
            "cross_entropy_loss", grid, 256, stats.data_ptr(), loss.data_ptr(), lse.data_ptr(), smoothing, rows, classes
        )
    return loss, (logits, target, lse, smoothing, vocab_start, classes, inplace_backward)


def _why_not_embedding(weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None) -> Sequence[str]:
    return reasons(weight)


FEW_IDS = 3072
"""Up to so many ids torch's embedding_dense_backward adds into the gradient itself."""


def _embedding_bwd(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    rows, absent, v_local, dtype = residuals
    if absent is not None:
        dy = dy.masked_fill(absent[..., None], 0.0)
    # torch's CUDA kernel for many ids sorts them and adds the rows of each in float32. The one for few ids, and the
    # CPU's, round every sum to dy's dtype: they are given float32.
    grad = dy.float() if launch.simulated() or rows.numel() <= FEW_IDS else dy
    return (torch.ops.aten.embedding_dense_backward.default(grad, rows, v_local, -1, False).to(dtype),)


@Cuda.impl(ops.embedding, id="cuda/torch", why_not=_why_not_embedding, bwd=_embedding_bwd)
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
