"""Counts the bytes of live tensors in torch operations, now and at the peak, without querying an allocator.

A storage counts, with its current size, from the operation that returned it until nothing refers to it; views share
their storage. Therefore the figures are the same on every machine and exactly reproducible. Storages that existed
before do not count, except those of tensors that are resized.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of plain tensors among `values`, by identity; wrappers like DTensor contain plain tensors."""
    plain = (
        t for t in tree_leaves(values) if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type != "meta"
    )
    return {s._cdata: s for s in (t.untyped_storage() for t in plain)}


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with LiveBytes() as live: ...`; then `live.now()` and `live.peak`, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, StorageWeakRef] = {}

    def __enter__(self) -> LiveBytes:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # resize_ may be the first operation that returns a storage, because frombuffer is not dispatched.
        inputs = {} if function is torch.ops.aten.resize_.default else _storages((args, kwargs))
        result = function(*args, **(kwargs or {}))
        new = {key: s for key, s in _storages(result).items() if key not in inputs}
        if new:
            # torch's stubs do not type StorageWeakRef.
            self._alive.update({key: StorageWeakRef(s) for key, s in new.items()})  # type: ignore[no-untyped-call]
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes of all storages that were created inside the context and are still referenced."""
        self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        # fully_shard frees a storage by resizing it to zero, so sizes are queried every time.
        storages = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._alive.values())
        return sum(s.nbytes() for s in storages if s is not None)
