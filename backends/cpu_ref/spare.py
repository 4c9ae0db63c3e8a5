"""Tells whether a saved tensor's memory may take the gradient: nobody but this backward pass can see it again.

That is so if the graph is not kept and no Python variable, other tensor, view, storage handle or other node of a graph
refers to it, which shows in reference counts. What the counts are when nobody does is not assumed but learned once, by
running the same backward pass on tensors that are held in each of these ways and on tensors that are not; where the two
cannot be told apart, the answer is always no.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Signature = tuple[Any, ...]
_learning: ContextVar[list[Signature] | None] = ContextVar("learning", default=None)
_spare: dict[str, frozenset[Signature]] = {}


def _counts(t: Tensor) -> Signature:
    storage = t.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(t), t._use_count(), sys.getrefcount(storage), uses


def _signature(t: Tensor) -> Signature:
    base = t._base
    return (_counts(t), None if base is None else _counts(base))


def is_spare(kind: str, t: Tensor, run: Callable[[Tensor], Tensor]) -> bool:
    """Whether `t`, a tensor that the running backward pass saved, may be overwritten with a gradient.

    run: computes, on a tensor [1, 8], the op in whose backward pass `kind` this is asked; used to learn. Always ask
    from the same place: the caller's own references count.
    """
    signature = _signature(t)
    learned = _learning.get()
    if learned is not None:
        learned.append(signature)
        return False
    if t.is_leaf or torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    if kind not in _spare:
        _spare[kind] = _learn(run)
    return signature in _spare[kind]


class _Source(torch.autograd.Function):
    """A tensor with a history, whole or (as linear's output is) a view made inside a function."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, view: bool, kept: list[object]) -> Tensor:
        whole = torch.zeros(8) if view else torch.zeros(1, 8)
        kept.append(whole)
        return whole.view(1, 8) if view else whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.zeros(1), None, None


_WAYS_TO_HOLD: list[Callable[[Tensor, list[object]], object]] = [
    lambda t, kept: t,
    lambda t, kept: t.view(8),
    lambda t, kept: t.detach(),
    lambda t, kept: t.untyped_storage(),
    lambda t, kept: list(kept),
]


def _learn(run: Callable[[Tensor], Tensor]) -> frozenset[Signature]:
    def observe(view: bool, hold: Callable[[Tensor, list[object]], object] | None) -> list[Signature]:
        seen: list[Signature] = []
        token = _learning.set(seen)
        try:
            kept: list[object] = []
            t = _Source.apply(torch.zeros(1, requires_grad=True), view, kept)
            held = None if hold is None else hold(t, kept)
            kept.clear()
            loss = run(t)
            del t
            loss.sum().backward()
            del held
        finally:
            _learning.reset(token)
        return seen

    with torch.enable_grad():
        free = {s for view in (False, True) for s in observe(view, None)}
        held = {s for view in (False, True) for hold in _WAYS_TO_HOLD for s in observe(view, hold)}
    return frozenset(free - held)
