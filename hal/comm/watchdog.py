"""Identifies the ranks that did not join a collective: each rank publishes its count of started collectives per group.

A thread writes the counts into the world's store twice a second, so that the cost for a collective is one integer
addition. The count of a rank that has stopped or hangs no longer increases, which is how the other ranks identify it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from typing import Any

import torch.distributed as dist

from ..errors import ContractError

INTERVAL = 0.5
"""Seconds between two publications."""

RECENT = 1000
"""The names of this many collectives are kept, by how many a host may run ahead of its device."""

STORE_ANSWERS = 60.0
"""Seconds that a process waits at exit for the store to answer its publishing thread. With 5 seconds, a process on a
machine that was busy with other jobs was aborted."""


class GroupProgress:
    """This rank's count of started collectives in one group, and access to the counts of the other ranks."""

    def __init__(self, world: Progress, key: str, rank: int, size: int) -> None:
        self._world, self._key, self._rank, self._size = world, key, rank, size
        self.seq, self.op = 0, ""
        self.published = -1
        self._recent: deque[str] = deque(maxlen=RECENT)

    def arrive(self, op: str) -> int:
        """Counts one more collective; returns its number."""
        self.op = op
        self.seq += 1
        self._recent.append(op)
        return self.seq

    def op_of(self, seq: int) -> str:
        """The name of collective number `seq`; "collective" if it was too long ago."""
        at = seq - self.seq - 1
        return self._recent[at] if -len(self._recent) <= at < 0 else "collective"

    def publish(self, store: Any) -> None:
        """Writes the count, if it changed."""
        seq, op = self.seq, self.op
        if seq != self.published:
            store.set(f"{self._key}/{self._rank}", f"{seq} {op}")
            self.published = seq

    def missing_ranks(self, op: str, seq: int) -> list[int]:
        """The group's ranks that have not started collective number `seq`; empty if the store does not answer.

        Raises ContractError if a rank started another collective than `op` under that number.
        """
        published = self._published()
        different = {r: o for r, (s, o) in published.items() if s == seq and o != op}
        if different:
            raise ContractError(
                f"collective #{seq} is {op} on rank {self._rank} of the group, but {different} elsewhere"
            )
        return [r for r, (s, _) in published.items() if s < seq]

    def counts_behind(self) -> dict[int, int]:
        """How many collectives each rank has started that is behind this one; empty if the store does not answer."""
        return {r: seq for r, (seq, _) in self._published().items() if seq < self.seq} if self.seq else {}

    def _published(self) -> dict[int, tuple[int, str]]:
        """The counts of the other ranks, with the name of their latest collective; empty without an answer."""
        try:
            store = self._world.connect()
            self.publish(store)
            threading.Event().wait(2 * INTERVAL)  # the others' latest counts may not be published yet
            return {r: self._read(store, r) for r in range(self._size) if r != self._rank}
        except RuntimeError:
            return {}

    def _read(self, store: Any, rank: int) -> tuple[int, str]:
        key = f"{self._key}/{rank}"
        if not store.check([key]):
            return 0, ""
        seq, _, op = store.get(key).decode().partition(" ")
        return int(seq), op


def _own_connection(store: Any) -> Any:
    """A store with the contents of a process group's store, and with a connection of its own.

    torch 2.6 cannot clone a store. There the new store is the one below all prefixes, which on every rank is the same.
    """
    if hasattr(store, "clone"):
        return store.clone()
    torch_dist: Any = dist
    base = store._underlying_non_prefix_store if isinstance(store, torch_dist.PrefixStore) else store
    if isinstance(base, torch_dist.TCPStore):
        return torch_dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=base.timeout)
    return base  # of files or of one process, without connections


class Progress:
    """Publishes the counts of all groups of this process, in a separate thread."""

    _current: Progress | None = None

    def __init__(self, world: Any) -> None:
        self.world: Any = world
        self.groups: list[GroupProgress] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hal-progress", daemon=True)
        self._thread.start()
        # A thread that is inside the store's C++ code when the interpreter ends would abort the process.
        atexit.register(self._end)

    def connect(self) -> Any:
        """A new connection to the world's store, with keys of its own."""
        default = dist.distributed_c10d._get_default_store()
        # torchrun keeps its store when it starts the processes again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(  # type: ignore[attr-defined]
            f"hal.progress/{attempt}", _own_connection(default)
        )

    @classmethod
    def of_world(cls) -> Progress:
        """The instance that belongs to the current default process group."""
        if cls._current is None or cls._current.world is not dist.group.WORLD:
            if cls._current is not None:
                cls._current._end()
            cls._current = cls(dist.group.WORLD)
        return cls._current

    @classmethod
    def release(cls) -> None:
        """Stops publishing and drops the reference to the default process group."""
        if (current := cls._current) is not None:
            current._end()
            current.world = cls._current = None

    def missing_ranks(self, rank: int, size: int, seconds: float) -> list[int]:
        """Publishes that this rank's collective failed; returns the ranks that did not do so within `seconds`.

        When one rank hangs, all ranks that wait for it, directly or not, time out at about the same time. The hung rank
        is the one that did not time out.
        """
        try:
            store = self.connect()
            store.set(f"lost/{rank}", "")
            end = time.monotonic() + seconds
            while True:
                missing = [r for r in range(size) if not store.check([f"lost/{r}"])]
                if not missing or time.monotonic() > end:
                    return missing
                time.sleep(0.1)
        except RuntimeError:
            return []

    def group(self, key: str, rank: int, size: int) -> GroupProgress:
        """Starts counting for one group. `key` is its name, the same on all its ranks."""
        progress = GroupProgress(self, key, rank, size)
        self.groups.append(progress)
        return progress

    def _end(self) -> None:
        self._stop.set()
        self._thread.join(timeout=STORE_ANSWERS)

    def _loop(self) -> None:
        store: Any = None
        try:
            while not self._stop.wait(INTERVAL):
                # A separate connection, because another thread may be waiting for an answer on the first one.
                store = store or self.connect()
                for group in list(self.groups):
                    group.publish(store)
        except RuntimeError:
            return  # the store has shut down with the job
