"""Memory for the results of kernels: large ones from plain malloc, which hands out again what was just freed.

torch asks the C library for aligned blocks. glibc cuts slivers off those, which its caches of small blocks may keep:
what was freed is then too small for the next request of the same size: blocks are handed out in turns, cold in the
caches, and the heap grows into pages never touched, which cost more than most kernels. A plain request fits the block
that an equal one has just left; it is aligned inside.

Such a tensor is an ordinary one, except that its storage cannot be resized; the block is freed with its last view. With
the backend's option keep_memory=False every tensor is torch's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import build

LARGE = 1 << 20
"""Bytes from which a tensor is made here. It takes 3 us, torch's own way 0.7, filling so many bytes 15 or more."""
_LINE = 64

_largest_of_torch = LARGE - 1


def plain(large: bool) -> None:
    """Whether large tensors come from plain malloc, in this process from now on; at first they do."""
    global _largest_of_torch
    _largest_of_torch = LARGE - 1 if large else sys.maxsize


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor. Raises MemoryError."""
    if math.prod(shape) * dtype.itemsize <= _largest_of_torch:
        return torch.empty(shape, dtype=dtype)
    return _large(shape, dtype)


def empty_like(x: Tensor) -> Tensor:
    """The same, with the shape and dtype of x, which is contiguous."""
    return torch.empty_like(x) if x.nbytes <= _largest_of_torch else _large(x.shape, x.dtype)


def _large(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count, ffi = math.prod(shape), build.ffi()
    size = count * dtype.itemsize + _LINE
    block = _allocator()("char[]", size)
    offset = -int(ffi.cast("uintptr_t", block)) % _LINE
    storage = torch.frombuffer(ffi.buffer(block, size), dtype=dtype, count=count, offset=offset).untyped_storage()
    # Not a view (autograd would not let it be changed in place), and made by an operation that counters of memory see.
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)


@cache
def _allocator() -> Callable[[str, int], Any]:
    lib = build.lib()
    made: Callable[[str, int], Any] = build.ffi().new_allocator(
        lib.hal_allocate, lib.hal_free, should_clear_after_alloc=False
    )
    return made
