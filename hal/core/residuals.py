"""What the forward pass of a lowered op leaves for its backward pass, carried through a graph by one small tensor.

An implementation may save tensors of any number and shape, plain values, or torch's own graph. In a traced graph, every
tensor must be declared before any implementation runs, so residuals do not appear in it one by one. The forward returns
a *token*, an int64 tensor of one element on the CPU, whose memory owns the residuals: they are freed when the last
tensor that shares this memory is freed, as other saved tensors are.

A compiler may reuse the memory of an argument or a result after its last use in the graph. Residuals that share memory
with one are therefore not stored: the graph saves the argument itself, if `kept` contains it, and passes it to the
backward, where the residual is made from it again. If `kept` does not, the residual is a copy.
"""

from __future__ import annotations

import array
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import HalError
from .torch_versions import gradient_edge


class _Memory(array.array):  # type: ignore[type-arg]
    """The memory of a token: its number. `record` and the memory live equally long."""

    record: Any


_numbers = itertools.count(1)
_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def token_of(record: Any, slices: int | None = None) -> Tensor:
    """A token that owns `record`: int64 [1], or [slices, 1] for a batch, whose record is a list."""
    number = next(_numbers)
    memory = _Memory("q", [number] * (slices or 1))
    memory.record = record
    _memories[number] = memory
    # The storage holds a reference to the memory until it is freed itself.
    token = torch.frombuffer(memory, dtype=torch.int64)
    return token if slices is None else token.view(slices, 1)


def record_of(token: Tensor) -> Any:
    """The record that a token owns. Raises HalError if the token is a copy of one that has been freed."""
    memory = _memories.get(int(token.flatten()[0]))
    if memory is None:
        raise HalError(
            "the residuals of a lowered op are gone: its token was copied and the original freed. Tokens stay in this "
            "process and must not be moved, offloaded or saved; exclude hal::*_forward from the function that does so"
        )
    return memory.record


@dataclass
class _Saved:
    """One tensor that autograd saved. After `Record.settle`, `source` names the argument or result it is a view of."""

    tensor: Tensor | None
    source: int | None = None
    size: Sequence[int] = ()
    stride: Sequence[int] = ()
    offset: int = 0


@dataclass
class _Shelf:
    """The tensors that the nodes of one graph saved; apart from `Record`, because the nodes refer to it.

    used: the sources that residuals share memory with, kept or not. available: the sources, during a backward pass.
    """

    saved: list[_Saved] = field(default_factory=list)
    strides: dict[int, Sequence[int]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    available: Mapping[int, Tensor] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())
        self.saved.append(saved)
        return saved

    def unpack(self, saved: _Saved) -> Tensor:
        if saved.source is None:
            assert saved.tensor is not None
            return saved.tensor
        base, stride = self.available[saved.source], self.strides[saved.source]
        if base.stride() != stride:
            base = _laid_out(base, stride)
        return base.as_strided(saved.size, saved.stride, base.storage_offset() + saved.offset)


@dataclass
class Record:
    """The graph of one call of an implementation, without the tensors that its caller keeps.

    inputs: by name of a differentiated argument, the edge at which its gradient leaves the graph. outputs: for each
    differentiable result, the edge at which its gradient enters; None if it does not depend on the arguments.
    """

    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    shelf: _Shelf = field(default_factory=_Shelf)
    owners: list[Any] = field(default_factory=list)

    def edge(self, tensor: Tensor) -> Any:
        """The edge of the graph at `tensor`, which stays valid for the life of the record."""
        edge, owner = gradient_edge(tensor)
        self.owners.append(owner)
        return edge

    def settle(self, sources: Mapping[int, Tensor], kept: Sequence[int]) -> None:
        """Replaces saved tensors that share memory with a source by a reference to it, if it is kept, or by a copy.

        sources: the arguments and results of the call, by number, as the graph has them. kept: those that the backward
        pass is given.
        """
        owners = {_storage(t): i for i, t in reversed(list(sources.items())) if t.numel()}
        for saved in self.shelf.saved:
            t = saved.tensor
            assert t is not None
            source = owners.get(_storage(t)) if t.numel() else None
            if source is None:
                continue
            base = sources[source]
            self.shelf.used.add(source)
            if source in kept and base.dtype == t.dtype:
                self.shelf.strides[source] = base.stride()
                saved.tensor, saved.source = None, source
                saved.size, saved.stride = t.shape, t.stride()
                saved.offset = int(t.storage_offset() - base.storage_offset())
            else:
                saved.tensor = _laid_out(t, t.stride())

    def backward(self, available: Mapping[int, Tensor], upstream: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        """The gradient of each differentiated argument. upstream: one gradient per differentiable result, or None."""
        pairs = [(y, dy) for y, dy in zip(self.outputs, upstream) if y is not None and dy is not None]
        if not pairs:
            return dict.fromkeys(self.inputs)
        ys, dys = zip(*pairs)
        self.shelf.available = available
        try:
            # The graph stays: a compiled function may run its backward pass again, as torch's retain_graph allows.
            with _autograd_keys():
                inputs = list(self.inputs.values())
                grads = torch.autograd.grad(ys, inputs, dys, retain_graph=True, allow_unused=True)
        finally:
            self.shelf.available = {}
        return dict(zip(self.inputs, grads))


def _laid_out(t: Tensor, stride: Sequence[int]) -> Tensor:
    """A copy of t with exactly these strides, which an implementation may have recorded for its backward pass."""
    distinct = t
    for dim, step in enumerate(stride):
        if step == 0 and t.shape[dim] > 1:
            distinct = distinct.narrow(dim, 0, 1)
    copy = torch.empty_strided(distinct.shape, stride, dtype=t.dtype, device=t.device).copy_(distinct)
    return copy.as_strided(t.shape, stride)


def record(
    run: Callable[[Mapping[str, Any]], Any],
    given: Mapping[str, Any],
    differentiated: Sequence[str],
    nondiff_outputs: Sequence[int],
) -> tuple[list[Tensor], Record]:
    """Runs `run(given)` with a graph; returns its results, as they are, and the record of the graph, not settled."""
    entry = Record()
    with torch.enable_grad(), _autograd_keys(), _saving(entry.shelf):
        arguments = dict(given)
        for name in differentiated:
            arguments[name] = _Entry.apply(_anchor(), given[name])  # type: ignore[no-untyped-call]
            entry.inputs[name] = entry.edge(arguments[name])
        result = run(arguments)
        results = list(result) if isinstance(result, tuple) else [result]
        for i, y in enumerate(results):
            if i not in nondiff_outputs:
                entry.outputs.append(entry.edge(y) if y.requires_grad else None)
    return [y.detach() for y in results], entry


class _Entry(torch.autograd.Function):
    """An argument at which a graph begins. A leaf would do, but its node would keep the argument's memory."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def _anchor() -> Tensor:
    """An empty tensor that requires a gradient, so that autograd records the function that takes it."""
    return torch.empty(0, device="cpu").requires_grad_()


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


@contextmanager
def _saving(shelf: _Shelf) -> Iterator[None]:
    """Passes what autograd saves to `shelf`. Lifts functorch's ban on such hooks, which is meant for its levels."""
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if forbidden is not None:
        torch._C._autograd._saved_tensors_hooks_enable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(shelf.pack, shelf.unpack):
            yield
    finally:
        if forbidden is not None:
            torch._C._autograd._saved_tensors_hooks_disable(forbidden)


@contextmanager
def _autograd_keys() -> Iterator[None]:
    """Lets autograd record: torch runs the kernel of a torch op with autograd's dispatch keys excluded."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD_KEYS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


_AUTOGRAD_KEYS = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
