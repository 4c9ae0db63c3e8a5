"""Device-independent parts of the ops of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal import ops
from hal.core.call import Call

from .signatures import with_signature_of

_LOGITS, _SIGMOID, _SOFTMAX = range(3)
_OF_CHOSEN, _OF_ALL, _SIGMOIDS, _NORMALISED_SIGMOIDS = range(4)


class RouterSpec(NamedTuple):
    """The plain values of one call of ops.moe_router, with numbers in the place of names, for kernels to switch on.

    topk: experts per token. groups: number of groups of experts, 0 for none. group_topk: groups per token, 0 for none.
    scale: the factor of the probabilities.

    selection: the values of which the largest are chosen, before a bias is added: 0 the logits, 1 their sigmoid, 2
    their softmax. It is 0 wherever it makes no difference, which is without groups and bias.

    probability: 0 the softmax of the chosen logits, 1 the softmax of all logits, 2 the sigmoids of the chosen logits, 3
    these sigmoids divided by their sum.
    """

    topk: int
    groups: int
    group_topk: int
    scale: float
    selection: int
    probability: int


def router_spec(call: Call) -> RouterSpec:
    """The spec of a call of ops.moe_router, for `with_signature_of`.

    With "sinkhorn", selection has no meaning: the choice is an iteration over all tokens.
    """
    function, grouped, selection = call.score_function, call.num_groups is not None, _LOGITS
    if function == "sigmoid" and (grouped or call.expert_bias is not None):
        selection = _SIGMOID
    elif call.pre_softmax and grouped:
        selection = _SOFTMAX
    if function == "softmax":
        probability = _OF_ALL if call.pre_softmax else _OF_CHOSEN
    elif call.topk == 1:
        probability = _SIGMOIDS
    else:
        probability = _NORMALISED_SIGMOIDS if function == "sigmoid" else _OF_ALL
    scale = float(call.scaling_factor)
    return RouterSpec(call.topk, call.num_groups or 0, call.group_topk or 0, scale, selection, probability)


def router_from(
    forward: Callable[[Tensor, Tensor | None, Tensor, Tensor, bool, RouterSpec], None],
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, RouterSpec], None],
) -> tuple[Callable[..., tuple[tuple[Tensor, Tensor], tuple[Any, ...]]], Callable[..., tuple[Tensor]]]:
    """The forward and backward function of ops.moe_router, for `Backend.impl`.

    forward(logits [t, e], bias [e], probs [t, k], indices [t, k], given, spec): writes probs, and indices unless they
        are given. bias is None if there is none. Sinkhorn's algorithm is run by the reference, so that its choice is
        given, too.
    backward(logits, indices, dprobs [t, k], dlogits [t, e], spec): writes dlogits.

    All tensors are contiguous. Neither function is called for logits without an element.
    """

    @with_signature_of(ops.moe_router, spec=router_spec)
    def moe_router(
        logits: Tensor, score_function: str, expert_bias: Tensor | None, indices: Tensor | None, spec: RouterSpec
    ) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
        logits = logits.contiguous()
        if score_function == "sinkhorn" and indices is None:
            # The reference runs the iteration over all tokens with torch; only the chosen experts are used from its
            # result.
            indices = ops.moe_router.reference(logits, spec.topk, score_function=score_function)[1]
        given = indices is not None
        if indices is None:
            chosen = logits.new_empty((len(logits), spec.topk), dtype=torch.int64)
        else:
            chosen = indices.clone(memory_format=torch.contiguous_format)
        probs = logits.new_empty(chosen.shape)
        if logits.numel():
            bias = None if expert_bias is None else expert_bias.contiguous()
            forward(logits, bias, probs, chosen, given, spec)
        return (probs, chosen), (logits, chosen, spec)

    def bwd(residuals: tuple[Any, ...], dprobs: Tensor) -> tuple[Tensor]:
        logits, indices, spec = residuals
        dlogits = torch.empty_like(logits)
        if logits.numel():
            backward(logits, indices, dprobs.contiguous(), dlogits, spec)
        return (dlogits,)

    return moe_router, bwd


def permute_backward(
    gather: Callable[[Tensor, Tensor], Tensor],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The backward function of ops.permute, for a forward function whose residuals are (row_map,).

    gather(drows [n, h], row_map [t, k]): the sum of each token's rows [t, h], where -1 names none; both are contiguous.
    The function returns dx [t, h] and dprobs [t, k], which is None for a call without probs.
    """

    def backward(residuals: tuple[Any, ...], drows: Tensor, *dpermuted: Tensor) -> tuple[Tensor, Tensor | None]:
        (row_map,) = residuals
        dx = gather(drows.contiguous(), row_map)
        if not dpermuted:
            return dx, None
        return dx, torch.cat([dpermuted[0], dpermuted[0].new_zeros(1)])[row_map]  # -1 is the zero at the end

    return backward


def unpermute_from(
    gather: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    gradients: Callable[[Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor | None]],
) -> tuple[Callable[..., tuple[Tensor, tuple[Any, ...]]], Callable[..., tuple[Tensor, Tensor | None]]]:
    """The forward and backward function of ops.unpermute, for `Backend.impl`, with sums in float32.

    gather(rows [n, h], row_map [t, k], probs [t, k]): the sum of each token's rows times probs, [t, h], in the dtype of
        rows. probs is float32, or None for a call without them; -1 in row_map names no row.
    gradients(rows, row_map, probs, dy [t, h]): drows [n, h] like rows, zero in rows that row_map does not name, and
        dprobs [t, k] float32, None without probs, in which case the values of rows are undefined.

    All tensors that the functions take are contiguous.
    """

    def unpermute(rows: Tensor, row_map: Tensor, *, probs: Tensor | None = None) -> tuple[Tensor, tuple[Any, ...]]:
        rows, row_map = rows.contiguous(), row_map.contiguous()
        factors = None if probs is None else probs.detach().float().contiguous()
        # Only the gradient of probs reads the rows, so without probs they are not kept for the backward pass.
        kept = len(rows) if probs is None else rows
        return gather(rows, row_map, factors), (kept, row_map, factors, None if probs is None else probs.dtype)

    def backward(residuals: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, row_map, factors, dtype = residuals
        if factors is None:
            rows = dy.new_empty((rows, dy.shape[1]))
        drows, dprobs = gradients(rows, row_map, factors, dy.contiguous())
        return drows, None if dprobs is None else dprobs.to(dtype)

    return unpermute, backward


def permuted_probs(probs: Tensor, row_map: Tensor, rows: int) -> Tensor:
    """probs [t, k] in the order of the rows, [rows], with zeros in rows that row_map [t, k] does not name."""
    flat = row_map.flatten()
    permuted = probs.new_zeros(rows + 1)
    permuted.scatter_(0, torch.where(flat < 0, rows, flat), probs.detach().flatten())  # -1 goes to the last, cut off
    return permuted[:rows].clone()


def filled_groups(group_sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of each expert that has any, for rows in groups of these sizes, one after the other."""
    start = 0
    for expert, size in enumerate(group_sizes):
        if size:
            yield expert, slice(start, start + size)
        start += size
