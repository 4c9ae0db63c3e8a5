"""Counts the bytes of the tensors that operations return while they are alive."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """peak: the largest sum of the sizes of the storages of tensors that operations inside of the block have returned
    and that were alive at the same time. Tensors without data (meta) do not count, and neither do mappings of files, of
    which the kernel keeps no more in memory than it likes."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, int] = {}  # live tensors of each storage
        self._bytes: dict[int, int] = {}
        self._ids: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and id(tensor) not in self._ids:
                self._add(tensor)
        self.peak = max(self.peak, sum(self._bytes.values()))
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.filename is not None:
            return
        key = storage._cdata
        self._ids.add(id(tensor))
        self._tensors[key] = self._tensors.get(key, 0) + 1
        self._bytes[key] = storage.nbytes()
        weakref.finalize(tensor, self._remove, id(tensor), key)

    def _remove(self, number: int, key: int) -> None:
        self._ids.discard(number)
        self._tensors[key] -= 1
        if not self._tensors[key]:
            del self._tensors[key], self._bytes[key]
