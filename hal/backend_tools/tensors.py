"""Queries about tensors that are shared by backends with their own kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


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


_host_values: MutableMapping[Tensor, tuple[int, Any]] = WeakIdKeyDictionary()
"""Tensor on a device -> (its version when it was read, its content)."""


def host_value(x: Tensor) -> Any:
    """`x.tolist()`; of a tensor on a device, which has to be waited for, read again only after x has changed."""
    if x.device.type == "cpu" or x.is_inference():  # nothing to wait for; and inference tensors count no versions
        return x.tolist()
    known = _host_values.get(x)
    if known is None or known[0] != x._version:
        _host_values[x] = known = (x._version, x.tolist())
    return known[1]
