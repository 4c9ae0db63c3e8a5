"""Queries about tensors that are shared by backends with their own kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor


def host_tensor_reasons(
    dtypes: Collection[torch.dtype], dtype_note: str, device_note: str
) -> Callable[..., Sequence[str]]:
    """Returns `reasons(*tensors)` for kernels that read host memory: the reasons why they cannot take these tensors.

    dtypes: what the kernels take. The notes describe the accepted dtypes and devices; they follow the refused dtype or
    device in parentheses. The function accepts None for a missing tensor, and meta tensors, which `hal why` passes. Its
    result depends on dtypes and devices only, so it may be marked with `hal.by_metadata`.
    """

    def reasons(*tensors: Tensor | None) -> Sequence[str]:
        for t in tensors:
            if t is not None and (t.dtype not in dtypes or not (t.is_cpu or t.is_meta)):
                return explain(t for t in tensors if t is not None)
        return ()

    def explain(tensors: Iterable[Tensor]) -> Sequence[str]:
        texts = []
        for t in tensors:
            if t.dtype not in dtypes:
                texts.append(f"dtype {t.dtype} ({dtype_note})")
            if not (t.is_cpu or t.is_meta):
                texts.append(f"a tensor on {t.device} ({device_note})")
        return list(dict.fromkeys(texts))

    return reasons


def rows_of(x: Tensor) -> int:
    """The number of rows of x, where a row is its last dimension; 0 if rows are empty."""
    width = x.shape[-1]
    return x.numel() // width if width else 0


def by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """The tensors grouped by dtype, in the order in which dtypes appear."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    return groups


def copy_back(tensors: Sequence[Tensor], dense: Sequence[Tensor]) -> None:
    """Copies the results of an in-place op that ran on `t.contiguous()` of every tensor back to those tensors."""
    for t, copy in zip(tensors, dense):
        if copy is not t:
            t.copy_(copy)
