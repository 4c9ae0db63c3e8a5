"""Which tensors are alive at every time of a `with` block, by kind, and a snapshot in the format of torch's viewer.

A storage counts from the operation that returned it until nothing refers to it; views share their storage. So the
figures are bytes of tensors, the same on every machine, without what an allocator adds.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..spans import Span
from .trace import title

REST = "activations and temporary"
"""The kind of storages that nobody named."""


@dataclass
class _Life:
    """A storage: its bytes, the operation of torch that made it, when it was made and freed (ns; None: alive)."""

    size: int
    origin: str
    made: int
    freed: int | None = None
    kind: str = REST


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """The storages of plain tensors among `values`; wrappers like DTensor contain plain tensors."""
    plain = (t for t in tree_leaves(values) if type(t) in (Tensor, torch.nn.Parameter) and t.device.type != "meta")
    return [t.untyped_storage() for t in plain]


class MemoryHistory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with MemoryHistory() as memory: ...`; then `memory.curve()` and `memory.save_snapshot(path)`.

    That a storage was freed or resized is seen at the next allocation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lives: list[_Life] = []
        # Storages by identity. The weak reference keeps the identity from being used again.
        self._alive: dict[int, tuple[StorageWeakRef, _Life]] = {}

    def __enter__(self) -> MemoryHistory:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._sweep()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Taken before the call, since set_ replaces a storage. resize_ may be the first operation that returns one,
        # because frombuffer is not dispatched.
        resizes = function is torch.ops.aten.resize_.default
        inputs = set() if resizes else {s._cdata for s in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._alive and storage._cdata not in inputs:
                self._add(storage, str(function))
        return result

    def _add(self, storage: torch.UntypedStorage, origin: str) -> _Life:
        self._sweep()
        life = _Life(storage.nbytes(), origin, time.perf_counter_ns())
        self._lives.append(life)
        self._alive[storage._cdata] = StorageWeakRef(storage), life  # type: ignore[no-untyped-call]
        return life

    def _sweep(self) -> None:
        """Notes what was freed or resized since the last allocation, e.g. by fully_shard. Autograd keeps storages
        without their Python objects, whose finalizers would therefore run too early."""
        now = time.perf_counter_ns()
        for key, (reference, life) in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes() == life.size:
                continue
            life.freed = now
            if storage is None:
                del self._alive[key]
            else:
                resized = _Life(storage.nbytes(), life.origin, now, kind=life.kind)
                self._lives.append(resized)
                self._alive[key] = reference, resized

    def mark(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Names the kind of these tensors' storages, for their whole life; of those that existed before, too."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._alive.get(storage._cdata)
            life = self._add(storage, "before the recording") if known is None else known[1]
            if known is None:
                life.made = 0
            life.kind = kind

    def curve(self) -> tuple[list[int], dict[str, list[int]]]:
        """(times in ns, bytes of each kind from then on). Storages that existed before are there from the start."""
        changes: list[tuple[int, str, int]] = []
        for life in self._lives:
            changes.append((life.made, life.kind, life.size))
            if life.freed is not None:
                changes.append((life.freed, life.kind, -life.size))
        now = {life.kind: 0 for life in self._lives}
        times: list[int] = []
        curves: dict[str, list[int]] = {kind: [] for kind in now}
        for at, kind, change in sorted(changes, key=lambda c: c[0]):
            now[kind] += change
            if not times or at != times[-1]:
                times.append(at)
                for name, curve in curves.items():
                    curve.append(now[name])
            else:
                for name, curve in curves.items():
                    curve[-1] = now[name]
        return times, curves

    def peak(self) -> Mapping[str, int]:
        """Bytes of each kind at the time of the largest sum."""
        times, curves = self.curve()
        if not times:
            return {}
        at = max(range(len(times)), key=lambda i: sum(curve[i] for curve in curves.values()))
        return {kind: curve[at] for kind, curve in curves.items()}

    def save_snapshot(self, path: Path, recorded: Sequence[Span] = ()) -> None:
        """Writes a file for torch's memory viewer (pytorch.org/memory_viz): a pickle of dictionaries and numbers, like
        that of torch.cuda.memory._dump_snapshot. Addresses are numbers that are unique to a storage. recorded: spans,
        of which those around an allocation are shown as its stack."""
        events: list[dict[str, Any]] = []
        stacks = _stacks({n: life.made for n, life in enumerate(self._lives)}, recorded)
        for number, life in enumerate(self._lives):
            names = [life.origin, *stacks[number]]
            frames = [{"filename": life.kind, "name": name, "line": 0} for name in names]
            event = {"addr": (number + 1) << 20, "size": life.size, "stream": 0, "frames": frames}
            events.append({**event, "action": "alloc", "time_us": life.made // 1000})
            if life.freed is not None:
                events.append({**event, "action": "free_requested", "time_us": life.freed // 1000})
                events.append({**event, "action": "free_completed", "time_us": life.freed // 1000})
        events.sort(key=lambda e: e["time_us"])
        path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))


def _stacks(times: Mapping[int, int], recorded: Sequence[Span]) -> dict[int, list[str]]:
    """For each time, by its key, the names of the spans around it, the innermost first."""
    spans, open_spans, at = sorted(recorded, key=lambda s: (s.begin, -s.end)), list[Span](), 0
    stacks = {}
    for key, moment in sorted(times.items(), key=lambda item: item[1]):
        while at < len(spans) and spans[at].begin <= moment:
            open_spans.append(spans[at])
            at += 1
        open_spans = [s for s in open_spans if s.end >= moment]
        stacks[key] = [title(s) for s in reversed(open_spans)]
    return stacks
