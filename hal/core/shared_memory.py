"""Refuses calls whose written tensors share memory with other arguments.

Checks of metadata are cached. These checks depend on addresses and therefore run on every call of an op that writes to
its arguments; they take about 2 us for tensors, and 0.1 us per tensor of a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def refuse_repeated(op: str, written: Mapping[str, Sequence[Tensor] | None], read: Mapping[str, Any]) -> None:
    """Raises ContractError if a tensor of a list that the call writes is also another tensor of its lists.

    Tensors are the same if they begin at the same address, e.g. a tied weight that is given twice. Overlaps of other
    kinds are not looked for: the extents of hundreds of tensors would take a third of the time of the call.
    """
    lists = [(name, x) for name, x in (*written.items(), *read.items()) if isinstance(x, (list, tuple)) and x]
    if not all(isinstance(x[0], Tensor) and not isinstance(x[0], FakeTensor) for _, x in lists):
        return
    addresses = [address for _, x in lists for address in map(Tensor.data_ptr, x)]
    if len(set(addresses)) == len(addresses):
        return
    places: dict[int, str] = {}  # address of a written tensor -> its name; the written ones come first
    for name, tensors in lists:
        for i, address in enumerate(map(Tensor.data_ptr, tensors)):  # 0: no memory
            if address and address in places:
                raise ContractError(
                    f"{op}: expected {places[address]}, which is written, and {name}[{i}] in separate memory; found "
                    f"that they are the same. Pass each tensor once"
                )
            if name in written:
                places[address] = f"{name}[{i}]"


def _extent(x: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of x and of the byte after its last one; (0, 0) if it is empty."""
    first: int = x.data_ptr()
    if x.is_contiguous():
        return first, first + x.nbytes
    if not x.numel():
        return 0, 0
    return first, first + x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())))
