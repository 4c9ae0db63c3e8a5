"""cross_entropy in blocks of rows: float32 copies of the logits exist for one block at a time.

Forward keeps two numbers per token, from which backward computes the probabilities again. Each pass writes a block
twice in float32; npu_cross_entropy_loss is not used because it keeps log-probabilities in the logits' dtype, of which
the gradient is wrong by several percent in 16 bits, and takes no label smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal import Comm, ops
from hal.backend_tools import cross_entropy_from

from .device import Npu
from .tensors import refuses

BLOCK = 1 << 24
"""Elements of a block: 64 MiB in float32."""


def _blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, width))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _local(target: Tensor, vocab_start: int, width: int) -> tuple[Tensor, Tensor]:
    """(column of the target in this shard, 0 if it is in another; whether it is in another), both [rows, 1]."""
    column = (target.reshape(-1, 1) - vocab_start).long()
    absent = (column < 0) | (column >= width)
    return column.masked_fill(absent, 0), absent


def _forward(
    logits: Tensor, target: Tensor, smoothing: float, vocab_start: int, classes: int, comm: Comm | None
) -> tuple[Tensor, Tensor]:
    """loss like target, and the statistics of every token, float32 [2, rows]: the largest logit and the sum of
    exponentials relative to it. Their log-sum-exp would round away digits of large logits."""
    x, shape = logits.reshape(-1, logits.shape[-1]), target.shape
    column, absent = _local(target, vocab_start, x.shape[-1])
    # 16-bit values are compared as they are; only their differences from the maximum need float32.
    top = x.amax(-1, keepdim=True).float()
    if comm is not None:
        top = comm.all_reduce(top, "max")
    sums = top.new_zeros(3, x.shape[0])  # of exponentials, the target's logit, and of logits if there is smoothing
    for rows in _blocks(*x.shape):
        z = x[rows] - top[rows]
        sums[1, rows] = z.gather(-1, column[rows]).masked_fill(absent[rows], 0.0).squeeze(-1)
        if smoothing:
            sums[2, rows] = z.sum(-1)
        sums[0, rows] = z.exp_().sum(-1)
    if comm is not None:
        sums = comm.all_reduce(sums)
    lse = sums[0].log()
    loss = lse - sums[1]
    if smoothing:
        loss = (1.0 - smoothing) * loss - smoothing * (sums[2] / classes - lse)
    return loss.view(shape), torch.stack((top.squeeze(-1), sums[0]))


def _backward(
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    dloss: Tensor,
    dlogits: Tensor,
    smoothing: float,
    vocab_start: int,
    classes: int,
) -> None:
    x, dx = (t.view(-1, t.shape[-1]) for t in (logits, dlogits))
    column, absent = _local(target, vocab_start, x.shape[-1])
    top, total = statistics[0, :, None], statistics[1, :, None]
    dloss = dloss.float().reshape(-1, 1)
    hit = torch.zeros_like(column, dtype=torch.float32).masked_fill(~absent, smoothing - 1.0) * dloss
    for rows in _blocks(*x.shape):
        dz = (x[rows] - top[rows]).exp_().mul_(dloss[rows] / total[rows])
        if smoothing:
            dz -= dloss[rows] * (smoothing / classes)
        dx[rows] = dz.scatter_add_(-1, column[rows], hit[rows])


cross_entropy, _bwd = cross_entropy_from(_forward, _backward)
Npu.impl(ops.cross_entropy, id="npu/blocks", why_not=refuses(ops.cross_entropy, "logits"), bwd=_bwd)(cross_entropy)
