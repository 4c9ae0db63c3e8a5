"""Device-independent parts of embedding and cross_entropy over a vocabulary that may be sharded across a Comm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.comm.contract import Comm

from .signatures import with_signature_of


def cross_entropy_from(
    forward: Callable[[Tensor, Tensor, float, int, int, Comm | None], tuple[Tensor, Tensor]],
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int, int], None],
    empty_like: Callable[[Tensor], Tensor] = torch.empty_like,
) -> tuple[Callable[..., tuple[Tensor, tuple[Any, ...]]], Callable[..., tuple[Tensor]]]:
    """The forward and backward function of ops.cross_entropy, for `Backend.impl`.

    forward(logits [..., v_local], target [...], smoothing, vocab_start, classes, comm): (loss [...], statistics), of
        contiguous tensors. smoothing is e' of the op's definition; classes is v, the size of the full vocabulary; comm
        is None unless it has several ranks.
    backward(logits, target, statistics, dloss, dlogits, smoothing, vocab_start, classes): writes dlogits, which is
        contiguous (as is dloss), has at least one element, and may share the memory of logits.
    empty_like: allocates dlogits unless the caller permits overwriting logits (`inplace_backward`).
    """

    @with_signature_of(ops.cross_entropy)
    def cross_entropy(
        logits: Tensor,
        target: Tensor,
        label_smoothing: float,
        vocab_start: int,
        comm: Comm | None,
        inplace_backward: bool,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        logits, target = logits.contiguous(), target.contiguous()
        sharded = comm if comm is not None and comm.size > 1 else None
        classes = logits.shape[-1] * (1 if sharded is None else sharded.size)
        smoothing = label_smoothing * classes / (classes - 1) if label_smoothing else 0.0
        loss, statistics = forward(logits, target, smoothing, vocab_start, classes, sharded)
        return loss, (logits, target, statistics, smoothing, vocab_start, classes, inplace_backward)

    def bwd(residuals: tuple[Any, ...], dloss: Tensor) -> tuple[Tensor]:
        logits, target, statistics, smoothing, vocab_start, classes, inplace = residuals
        dlogits = logits if inplace else empty_like(logits)
        if logits.numel():
            backward(logits, target, statistics, dloss.contiguous(), dlogits, smoothing, vocab_start, classes)
        if inplace:
            # Autograd then refuses a second backward pass, which would read the gradient as if it were logits.
            torch.autograd.graph.increment_version(logits)
        return (dlogits,)

    return cross_entropy, bwd


def sharded_embedding(
    weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None
) -> tuple[Tensor, tuple[Any, ...]]:
    """ops.embedding implemented with torch's embedding: (output, residuals for `sharded_embedding_gradient`).

    weight [v_local, h], ids [...] -> [..., h]. A rank contributes zeros for ids that other ranks hold.
    """
    # Ids of other ranks look up row 0, whose values are then replaced by zeros, so that the sum over ranks is the row.
    absent, rows = None, ids
    if comm is not None and comm.size > 1:
        rows = ids - vocab_start
        absent = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill(absent, 0)
    y = torch.nn.functional.embedding(rows, weight)
    if comm is not None and absent is not None:
        y = comm.all_reduce(y.masked_fill_(absent[..., None], 0.0))
    return y, (rows, absent, weight.shape[0], weight.dtype)


def sharded_embedding_gradient(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor]:
    """The gradient [v_local, h] of weight, in its dtype; sums are formed in the dtype of dy [..., h]."""
    rows, absent, v_local, dtype = residuals
    if absent is not None:
        dy = dy.masked_fill(absent[..., None], 0.0)
    return (torch.ops.aten.embedding_dense_backward.default(dy, rows, v_local, -1, False).to(dtype),)
