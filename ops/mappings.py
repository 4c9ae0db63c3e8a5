"""Collectives with gradients, at the borders of tensor- and sequence-parallel regions.

Each pair is a collective and its conjugate in the backward pass (Shoeybi et al., "Megatron-LM", arXiv 1909.08053,
section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2 for sequences). They are built on Comm and serve every
backend; inputs are never mutated. With a comm of None or of one rank, each of them is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hal import Comm, ContractError


def _all_reduce(x: Tensor, comm: Comm, dim: int) -> Tensor:
    return comm.all_reduce(x)


def _identity(x: Tensor, comm: Comm, dim: int) -> Tensor:
    return x


def _gather(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """All ranks' x, concatenated along dim: [..., n, ...] -> [..., size * n, ...]."""
    parts = comm.all_gather(x if dim == 0 else x.transpose(0, dim))
    return parts if dim == 0 else parts.transpose(0, dim).contiguous()


def _split(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's chunk along dim: [..., size * n, ...] -> [..., n, ...]."""
    # A contiguous chunk is copied as well, because a view would keep the memory of the entire x.
    return x.chunk(comm.size, dim)[comm.rank].clone(memory_format=torch.contiguous_format)


def _reduce_scatter(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """This rank's chunk along dim of the sum of all ranks' x: [..., size * n, ...] -> [..., n, ...]."""
    part = comm.reduce_scatter(x if dim == 0 else x.transpose(0, dim))
    return part if dim == 0 else part.transpose(0, dim).contiguous()


def _all_to_all(x: Tensor, comm: Comm, dims: tuple[int, int]) -> Tensor:
    """Splits x along dims[0] and concatenates what arrives along dims[1]: [size * n, m] -> [n, size * m]."""
    split, concatenated = dims
    received = comm.all_to_all(torch.cat(x.chunk(comm.size, split)) if split else x)
    return torch.cat(received.chunk(comm.size), concatenated) if concatenated else received


Move = Callable[[Tensor, Comm, Any], Tensor]
"""A function of a tensor, the communicator and the dimension or dimensions that it acts on."""


class _Region(torch.autograd.Function):
    """y = move(x, comm, dims); dx = conjugate(dy, comm, back_dims)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, move: Move, conjugate: Move, dims: Any, back_dims: Any) -> Tensor:
        ctx.conjugate = comm, conjugate, back_dims
        y = move(x, comm, dims)
        return x.view_as(x) if y is x else y  # autograd requires a new tensor object

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        comm, conjugate, back_dims = ctx.conjugate
        return conjugate(dy, comm, back_dims), None, None, None, None, None


def _apply(x: Tensor, comm: Comm | None, move: Move, conjugate: Move, dims: Any, back_dims: Any = None) -> Tensor:
    """`move`, differentiable by its conjugate; back_dims: the dimensions of the latter, by default the same."""
    if comm is None or comm.size == 1:
        return x
    y: Tensor = _Region.apply(x, comm, move, conjugate, dims, dims if back_dims is None else back_dims)  # type: ignore[no-untyped-call]
    return y


def _dim(x: Tensor, comm: Comm | None, dim: int, divides: bool, name: str) -> int:
    """`dim` counted from the front.

    Raises ContractError if x has no such dimension or, with `divides`, its size is not divisible by the group size.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ContractError(f"{name}: dimension {dim} of a tensor of shape {tuple(x.shape)}")
    size = 1 if comm is None else comm.size
    if divides and x.shape[dim] % size:
        raise ContractError(f"{name}: {size} ranks cannot divide dimension {dim} of shape {tuple(x.shape)}")
    return dim % x.ndim


def copy_to_region(x: Tensor, comm: Comm | None) -> Tensor:
    """Identity forward, sum of the ranks' gradients backward."""
    return _apply(x, comm, _identity, _all_reduce, 0)


def reduce_from_region(x: Tensor, comm: Comm | None) -> Tensor:
    """Sum over the ranks forward, identity backward."""
    return _apply(x, comm, _all_reduce, _identity, 0)


def scatter_to_region(x: Tensor, comm: Comm | None, dim: int = -1) -> Tensor:
    """This rank's chunk along `dim` forward, gather backward. Every rank passes the same x."""
    return _apply(x, comm, _split, _gather, _dim(x, comm, dim, True, "scatter_to_region"))


def gather_from_region(x: Tensor, comm: Comm | None, dim: int = -1) -> Tensor:
    """The ranks' chunks concatenated along `dim` forward, this rank's chunk backward.

    For a result that every rank uses in the same way, so that its gradient is the same on every rank.
    """
    return _apply(x, comm, _gather, _split, _dim(x, comm, dim, False, "gather_from_region"))


def all_gather_to_region(x: Tensor, comm: Comm | None, dim: int = 0) -> Tensor:
    """Gather along `dim` forward, reduce-scatter backward: sequence-parallel activations enter a tensor-parallel layer.

    Each rank applies its own weight shard to the gathered tensor, so the gradient is the sum over the ranks.
    """
    return _apply(x, comm, _gather, _reduce_scatter, _dim(x, comm, dim, False, "all_gather_to_region"))


def reduce_scatter_from_region(x: Tensor, comm: Comm | None, dim: int = 0) -> Tensor:
    """Reduce-scatter along `dim` forward, gather backward: partial sums leave a tensor-parallel layer, sharded."""
    return _apply(x, comm, _reduce_scatter, _gather, _dim(x, comm, dim, True, "reduce_scatter_from_region"))


def all_to_all_in_region(x: Tensor, comm: Comm | None, split: int, concatenate: int) -> Tensor:
    """Chunk r along `split` goes to rank r; what arrives is concatenated along `concatenate`. Backward: the inverse."""
    split = _dim(x, comm, split, True, "all_to_all_in_region")
    concatenate = _dim(x, comm, concatenate, False, "all_to_all_in_region")
    return _apply(x, comm, _all_to_all, _all_to_all, (split, concatenate), (concatenate, split))


def broadcast_dict(
    values: Mapping[str, Tensor] | None, keys: Mapping[str, int], comm: Comm | None
) -> dict[str, Tensor]:
    """The int64 tensors named by `keys`, from rank 0 of the group (which passes `values`; the others pass None).

    keys: name -> number of dimensions. All shapes are sent in one message and all contents in another.
    With Megatron's tensor-parallel groups, the source is rank 0 of each group, not global rank 0.
    """
    if comm is None or comm.rank == 0:
        if values is None:
            raise ContractError("broadcast_dict: rank 0 of the group must pass the values")
        for name, ndim in keys.items():
            if name not in values or values[name].dtype != torch.int64 or values[name].ndim != ndim:
                actual = (values[name].dtype, values[name].ndim) if name in values else f"only {', '.join(values)}"
                raise ContractError(f"broadcast_dict: expected int64 '{name}' with {ndim} dimensions; found {actual}")
    if comm is None:
        assert values is not None
        return {name: values[name] for name in keys}
    device = next(iter(values.values())).device if values else comm.device
    sizes = [n for name in keys for n in (values[name].shape if values else [0] * keys[name])]
    sizes = comm.broadcast(torch.tensor(sizes, dtype=torch.int64, device=device)).tolist()
    shapes = {}
    for name, ndim in keys.items():
        shapes[name], sizes = sizes[:ndim], sizes[ndim:]
    counts = {name: int(torch.Size(shape).numel()) for name, shape in shapes.items()}
    flat = (
        torch.cat([values[name].reshape(-1) for name in keys])
        if values
        else torch.empty(sum(counts.values()), dtype=torch.int64, device=device)
    )
    parts = torch.split(comm.broadcast(flat), list(counts.values()))
    return {name: part.view(shapes[name]) for name, part in zip(keys, parts)}
