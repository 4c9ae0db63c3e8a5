"""Memory for the results of kernels: large results come from plain malloc, which reuses recently freed blocks.

torch requests aligned blocks from the C library. For those, glibc splits off small remainders, which its caches of
small blocks may keep, so that a freed block is too small for the next request of the same size. Requests then alternate
between blocks that are not in the caches, and the heap grows into fresh pages, whose faults cost more than most
kernels. A plain request fits the block that a request of the same size has just freed; the data is aligned within the
block.

Such a tensor behaves like any other, except that its storage cannot be resized; the block is freed with its last view.
With the backend's option keep_memory=False all tensors are allocated by torch.
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
"""The minimum number of bytes of tensors that are allocated here. An allocation takes 2 us (torch.empty: 0.7 us), while
writing this many bytes takes at least 15 us."""

_largest_of_torch = LARGE - 1


def use_plain_malloc(large: bool) -> None:
    """Sets, process-wide, whether large tensors come from plain malloc; initially they do."""
    global _largest_of_torch
    _largest_of_torch = LARGE - 1 if large else sys.maxsize


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor. Raises MemoryError."""
    if math.prod(shape) * dtype.itemsize <= _largest_of_torch:
        return torch.empty(shape, dtype=dtype)
    return _large(shape, dtype)


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised tensor with the shape and dtype of x, which is contiguous. Raises MemoryError."""
    return torch.empty_like(x) if x.nbytes <= _largest_of_torch else _large(x.shape, x.dtype)


def _large(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    allocate, buffer = _allocator()
    block = allocate("char[]", math.prod(shape) * dtype.itemsize)
    # resize_ gives the shape without a view, whose changes in place autograd restricts; the number of elements stays.
    # Unlike frombuffer, it is dispatched, so that counters of tensors' memory see it.
    return torch.frombuffer(buffer(block), dtype=dtype).resize_(shape)


@cache
def _allocator() -> tuple[Callable[[str, int], Any], Callable[[Any], Any]]:
    """Allocates a block that is freed with its last reference; makes a Python buffer of it."""
    lib, ffi = build.lib(), build.ffi()
    return ffi.new_allocator(lib.hal_allocate, lib.hal_free, should_clear_after_alloc=False), ffi.buffer
