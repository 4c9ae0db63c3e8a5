"""Refuses calls for what the tensors are rather than for their metadata: tangents, and shared memory.

A verdict on metadata is remembered; these are not, so they are part of every call and cost little: a comparison for
tangents, and about 2 us for the ops that write to a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import forward_ad

from ..errors import ContractError, UnsupportedOp

if TYPE_CHECKING:
    from .op import Op


def refuse_tangents(op: Op[Any, Any], run: Any, arguments: Mapping[str, Any]) -> None:
    """Raises UnsupportedOp if an argument has a tangent of forward-mode AD, which a kernel would drop.

    run: what runs the call. Only a reference (an op that is pinned to it) is made of torch's functions, which compute
    the tangent of the result.
    """
    if run is op.reference:
        return
    unpack: Any = forward_ad.unpack_dual  # untyped
    for name, value in arguments.items():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and unpack(tensor).tangent is not None:
                raise UnsupportedOp(
                    f"{op.name}: {name} has a tangent, and implementations have no forward-mode derivatives (jvp, "
                    f"jacfwd). Use reverse mode (backward, torch.autograd.grad), or hal.ops.{op.name}.reference, which "
                    f"torch differentiates"
                )


def refuse_shared_memory(op: str, written: Mapping[str, Tensor | None], read: Mapping[str, Any]) -> None:
    """Raises ContractError if a tensor that the call writes shares memory with another one of its arguments.

    What an implementation reads after it has written depends on its order of work. Two tensors count as sharing memory
    if one begins between the first and the last byte of the other, also if it lies between the rows of the other.
    """
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


def arguments_source(names: Sequence[str]) -> str:
    """Source text of a dictionary of the arguments with these names."""
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"
