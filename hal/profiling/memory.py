"""Which tensors are alive at every time of a `with` block, by kind, and a snapshot in the format of torch's viewer.

A storage counts from the operation that returned it until nothing refers to it; views share their storage. So the
figures are bytes of tensors, the same on every machine, without what an allocator adds.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
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


class MemoryHistory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with MemoryHistory() as memory: ...`; then `memory.curve()` and `memory.save_snapshot(path)`.

    A storage has the size with which it was made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lives, self._last = dict[int, _Life](), dict[int, _Life]()

    def __enter__(self) -> MemoryHistory:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = None
        for leaf in tree_leaves(result):
            if type(leaf) in (Tensor, torch.nn.Parameter) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage._cdata in self._last:
                    continue
                if inputs is None:
                    inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) is Tensor}
                if storage._cdata not in inputs:
                    self._add(storage, str(function))
        return result

    def _add(self, storage: torch.UntypedStorage, origin: str) -> _Life:
        key = storage._cdata
        life = _Life(storage.nbytes(), origin, time.perf_counter_ns())
        number = len(self._lives)
        self._lives[number] = self._last[key] = life
        weakref.finalize(storage, self._free, key, number)
        return life

    def _free(self, key: int, number: int) -> None:
        life = self._lives[number]
        life.freed = time.perf_counter_ns()
        if self._last.get(key) is life:
            del self._last[key]

    def mark(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Names the kind of these tensors' storages, for their whole life; of those that existed before, too."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            life = self._last.get(storage._cdata)
            if life is None:
                life = self._add(storage, "before the recording")
                life.made = 0
            life.kind = kind

    def curve(self) -> tuple[list[int], dict[str, list[int]]]:
        """(times in ns, bytes of each kind from then on). Storages that existed before are there from the start."""
        changes: list[tuple[int, str, int]] = []
        for life in self._lives.values():
            changes.append((life.made, life.kind, life.size))
            if life.freed is not None:
                changes.append((life.freed, life.kind, -life.size))
        now = {life.kind: 0 for life in self._lives.values()}
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
        events, stacks = [], _stacks({n: life.made for n, life in self._lives.items()}, recorded)
        for number, life in self._lives.items():
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
