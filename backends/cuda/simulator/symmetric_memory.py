"""Stand-ins on the CPU for the two of torch's ops on symmetric memory that the backend calls.

torch defines `symm_mem::fused_all_gather_matmul` and `symm_mem::fused_matmul_reduce_scatter` for CUDA devices. These
have the same schema, refuse what torch's refuse and compute the same over gloo, without overlap: partial products are
exchanged in the dtype of the arguments and added in float32, as torch adds them.
"""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


@functools.cache
def register() -> torch.library.Library:
    """Registers the stand-ins for tensors on the CPU, once in a process."""
    importlib.import_module("torch.distributed._symmetric_memory")  # defines the ops
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", fused_all_gather_matmul, "CPU")
    library.impl("fused_matmul_reduce_scatter", fused_matmul_reduce_scatter, "CPU")
    return library


def _require(x: Tensor, matrices: list[Tensor], dim: int) -> None:
    """Raises ValueError for the arguments for which torch's ops do."""
    if x.dim() < 2 or any(b.dim() != 2 for b in matrices):
        raise ValueError("A must be a matrix or have more dimensions, and B must be a matrix")
    if not 0 <= dim < x.dim():
        raise ValueError(f"dimension {dim} of a tensor of shape {tuple(x.shape)}")
    if dim == x.dim() - 1:
        raise NotImplementedError("the stand-in does not gather or scatter the summed dimension")


def fused_all_gather_matmul(
    A_shard: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """(gathered A, [gathered A @ B for B in Bs]); A_shard [..., m, ..., k], B [k, n], gathered along gather_dim."""
    _require(A_shard, Bs, gather_dim)
    ranks = c10d._resolve_process_group(group_name).size()
    shard = A_shard.movedim(gather_dim, 0).contiguous()
    rows = torch.ops._c10d_functional.all_gather_into_tensor(shard, ranks, group_name)
    rows = torch.ops._c10d_functional.wait_tensor(rows)
    flat = rows.flatten(0, -2)
    products = [torch.mm(flat, b).view(*rows.shape[:-1], b.shape[1]).movedim(0, gather_dim) for b in Bs]
    return rows.movedim(0, gather_dim) if return_A else None, products


def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """This rank's part along scatter_dim of the ranks' sum or average of A @ B; A [..., m, ..., k], B [k, n]."""
    _require(A, [B], scatter_dim)
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"reduce_op must be sum or avg, got {reduce_op}")
    ranks = c10d._resolve_process_group(group_name).size()
    rows = A.movedim(scatter_dim, 0)
    if rows.shape[0] % ranks:
        raise ValueError(f"{ranks} ranks do not divide dimension {scatter_dim} of shape {tuple(A.shape)}")
    partial = torch.mm(rows.flatten(0, -2), B)
    splits = [partial.shape[0] // ranks] * ranks
    exchanged = torch.ops._c10d_functional.all_to_all_single(partial, splits, splits, group_name)
    stacked = torch.ops._c10d_functional.wait_tensor(exchanged).view(ranks, -1, *rows.shape[1:-1], B.shape[1])
    summed = stacked.sum(0) if reduce_op == "sum" else stacked.mean(0)
    return summed.movedim(0, scatter_dim)
