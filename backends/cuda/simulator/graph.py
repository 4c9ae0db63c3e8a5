"""Recorded work on the simulator: what a CUDA graph would repeat, and nothing else.

A recording holds the operations of torch and the launches of kernels with their tensors and numbers as they were, so
that a number of the host which should change with every step shows as one that does not. As on a GPU, a recording
leaves memory as it was, and an operation whose result the host would have to wait for is an error. Copies between host
and device are not seen, because both have the same memory here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hal

from .build import Simulator

READS = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount"))
"""Operations of torch for which the host waits for the device, as their result's value or size is a number on it."""


def reads_on_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation would make the host wait for a GPU."""
    name = func._schema.name.removeprefix("aten::")
    indices = args[1] if name in ("index", "index_put_", "_index_put_impl_") else ()
    by_mask = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)
    return name in READS or by_mask or (name == "repeat_interleave" and kwargs.get("output_size") is None)


def recorded(engine: Simulator, function: Callable[[], Any]) -> Callable[[], Any]:
    """`Backend.capture` of the simulated device."""
    function()  # as on a GPU, where it loads and compiles what the recording needs
    steps: list[Callable[[], object]] = []
    memory = _Memory()
    with engine.recording(steps, memory.keep), _Recording(steps, memory):
        result = function()
    memory.restore()

    def replay() -> Any:
        with torch.no_grad():
            for step in steps:
                step()
        return result

    return replay


class _Memory:
    """What memory held before the recording wrote to it. Recorded work is done, because operations may need sensible
    values (indices), and undone at the end, since a GPU only records it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, bytes]] = {}

    def keep(self, tensors: Iterable[Tensor]) -> None:
        for storage in (x.untyped_storage() for x in tensors):
            at = storage.data_ptr()
            if at and at not in self._kept:
                # Not by torch's operations, which would be recorded.
                self._kept[at] = storage, ctypes.string_at(at, storage.nbytes())

    def restore(self) -> None:
        for at, (_, content) in self._kept.items():
            ctypes.memmove(at, content, len(content))


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, steps: list[Callable[[], object]], memory: _Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps, self._memory = steps, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reads_on_host(func, args, kwargs):
            raise hal.HalError(f"CUDA simulator: {func} has the host wait for the device, while a graph is recorded")
        written = [x for a, x in _named(func, args, kwargs) if a.alias_info is not None and a.alias_info.is_write]
        if written and torch.Tag.inplace_view not in func.tags:
            self._memory.keep(x for x in tree_leaves(written) if isinstance(x, Tensor))
            self._steps.append(lambda: func(*args, **kwargs))
            return func(*args, **kwargs)
        results = func(*args, **kwargs)
        # A view needs no work: its memory is that of its argument.
        if not any(r.alias_info is not None for r in func._schema.returns):
            self._steps.append(_repeated(func, args, kwargs, results))
        return results


def _named(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The arguments of an operation that were given, with their declarations."""
    declared = func._schema.arguments
    return [*zip(declared, args), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]


def _repeated(func: Any, args: Any, kwargs: Any, results: Any) -> Callable[[], None]:
    """A function that computes `results` again, from what the arguments hold then, in the same memory."""
    into = [x for x in tree_leaves(results) if isinstance(x, Tensor)]

    def step() -> None:
        for x, new in zip(into, (y for y in tree_leaves(func(*args, **kwargs)) if isinstance(y, Tensor))):
            x.copy_(new)

    return step
