"""Collectives with gradients: what enters and leaves a tensor- or sequence-parallel region.

Each pair is a collective and its conjugate in the backward pass (Shoeybi et al., "Megatron-LM", arXiv 1909.08053,
section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.2 for sequences). They exist once, above Comm, for every
backend; inputs are never mutated. A comm of None or of one rank makes each of them the identity.
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
    parts = comm.all_gather(x if dim == 0 else x.transpose(0, dim))
    return parts if dim == 0 else parts.transpose(0, dim).contiguous()


def _split(x: Tensor, comm: Comm, dim: int) -> Tensor:
    # A copy even where the chunk is contiguous: a view would keep all of x alive for as long as its part.
    return x.chunk(comm.size, dim)[comm.rank].clone(memory_format=torch.contiguous_format)


def _reduce_scatter(x: Tensor, comm: Comm, dim: int) -> Tensor:
    part = comm.reduce_scatter(x if dim == 0 else x.transpose(0, dim))
    return part if dim == 0 else part.transpose(0, dim).contiguous()


def _all_to_all(x: Tensor, comm: Comm, dims: tuple[int, int]) -> Tensor:
    split, concatenated = dims
    received = comm.all_to_all(torch.cat(x.chunk(comm.size, split)) if split else x)
    return torch.cat(received.chunk(comm.size), concatenated) if concatenated else received


Move = Callable[[Tensor, Comm, Any], Tensor]


class _Region(torch.autograd.Function):
    """y = forward(x); dx = backward(dy), for two functions that are each other's conjugate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, move: Move, conjugate: Move, how: Any, how_back: Any) -> Tensor:
        ctx.back = comm, conjugate, how_back
        y = move(x, comm, how)
        return x.view_as(x) if y is x else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        comm, conjugate, how = ctx.back
        return conjugate(dy, comm, how), None, None, None, None, None


def _apply(x: Tensor, comm: Comm | None, move: Move, conjugate: Move, how: Any, how_back: Any = None) -> Tensor:
    if comm is None or comm.size == 1:
        return x
    y: Tensor = _Region.apply(x, comm, move, conjugate, how, how if how_back is None else how_back)  # type: ignore[no-untyped-call]
    return y


def _dim(x: Tensor, comm: Comm | None, dim: int, divides: bool, name: str) -> int:
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

    For a result that every rank then uses alike, so that every rank has the same gradient of it.
    """
    return _apply(x, comm, _gather, _split, _dim(x, comm, dim, False, "gather_from_region"))


def all_gather_to_region(x: Tensor, comm: Comm | None, dim: int = 0) -> Tensor:
    """Gather along `dim` forward, reduce-scatter backward: sequence-parallel activations enter a tensor-parallel layer,
    where each rank computes something else with the whole and so has its own share of the gradient."""
    return _apply(x, comm, _gather, _reduce_scatter, _dim(x, comm, dim, False, "all_gather_to_region"))


def reduce_scatter_from_region(x: Tensor, comm: Comm | None, dim: int = 0) -> Tensor:
    """Reduce-scatter along `dim` forward, gather backward: partial sums leave a tensor-parallel layer, split again."""
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

    keys: name -> number of dimensions. One message for the shapes and one for the contents, whatever the count.
    With Megatron's tensor-parallel groups, rank 0 is each group's own source, not global rank 0.
    """
    if comm is None or comm.rank == 0:
        if values is None:
            raise ContractError("broadcast_dict: rank 0 of the group passes the values")
        for name, ndim in keys.items():
            if name not in values or values[name].dtype != torch.int64 or values[name].ndim != ndim:
                found = (values[name].dtype, values[name].ndim) if name in values else f"only {', '.join(values)}"
                raise ContractError(f"broadcast_dict: expected int64 '{name}' with {ndim} dimensions; found {found}")
    if comm is None:
        assert values is not None
        return {name: values[name] for name in keys}
    device = next(iter(values.values())).device if values else comm.device
    sizes = [n for name in keys for n in (values[name].shape if values else [0] * keys[name])]
    agreed = comm.broadcast(torch.tensor(sizes, dtype=torch.int64, device=device)).tolist()
    shapes = {}
    for name, ndim in keys.items():
        shapes[name], agreed = agreed[:ndim], agreed[ndim:]
    counts = {name: int(torch.Size(shape).numel()) for name, shape in shapes.items()}
    flat = (
        torch.cat([values[name].reshape(-1) for name in keys])
        if values
        else torch.empty(sum(counts.values()), dtype=torch.int64, device=device)
    )
    parts = torch.split(comm.broadcast(flat), list(counts.values()))
    return {name: part.view(shapes[name]) for name, part in zip(keys, parts)}
