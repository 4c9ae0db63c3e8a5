"""Refuses calls whose written tensors share memory with other arguments.

Checks of metadata are cached. This check depends on addresses and therefore runs on every call of an op that writes to
a tensor; it takes about 2 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import ContractError


def refuse_shared_memory(op: str, written: Mapping[str, Tensor | None], read: Mapping[str, Any]) -> None:
    """Raises ContractError if a tensor that the call writes shares memory with another one of its arguments.

    What an implementation reads after it has written depends on its order of work. Two tensors count as sharing memory
    if one begins between the first and the last byte of the other, also if it lies between the rows of the other.
    """
    if any(isinstance(x, FakeTensor) or x.is_meta for x in written.values() if x is not None):
        return  # they have no memory
    places = [(name, *_extent(x)) for name, x in written.items() if x is not None]
    others = places + [(name, *_extent(x)) for name, x in read.items() if isinstance(x, Tensor)]
    for i, (name, first, end) in enumerate(places):
        for other, other_first, other_end in others[i + 1 :]:
            if first < other_end and other_first < end:
                raise ContractError(
                    f"{op}: expected {name}, which is written, and {other} in separate memory; found that they "
                    f"overlap. Pass a copy of {other}"
                )


def _extent(x: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of x and of the byte after its last one; (0, 0) if it is empty."""
    first: int = x.data_ptr()
    if x.is_contiguous():
        return first, first + x.nbytes
    if not x.numel():
        return 0, 0
    return first, first + x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())))
