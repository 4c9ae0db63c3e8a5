"""Who is where: each rank publishes, beside its work, how many collectives it has started in each group.

A thread writes the counts into the world's store twice a second, so that collectives themselves pay one integer
addition; a rank that is stopped or stuck keeps its old count, which is how the others can name it.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any

import torch.distributed as dist

from .errors import ContractError

INTERVAL = 0.5
"""Seconds between two publications."""

STORE_ANSWERS = 60.0
"""Seconds that a process waits at its end for the store to answer its publishing thread. On a machine that is busy with
other jobs five were too few once, and the process was aborted."""


class GroupProgress:
    """This rank's count of started collectives in one group, and a view of the other ranks'."""

    def __init__(self, world: Progress, key: str, rank: int, size: int) -> None:
        self._world, self._key, self._rank, self._size = world, key, rank, size
        self.seq, self.op = 0, ""
        self.published = -1

    def arrive(self, op: str) -> int:
        """Counts one more collective; its number."""
        self.op = op
        self.seq += 1
        return self.seq

    def publish(self, store: Any) -> None:
        """Writes the count, if it changed."""
        seq, op = self.seq, self.op
        if seq != self.published:
            store.set(f"{self._key}/{self._rank}", f"{seq} {op}")
            self.published = seq

    def behind(self, op: str, seq: int) -> list[int]:
        """The group's ranks that have not started collective number `seq`; empty if that cannot be found out.

        Raises ContractError if a rank started another collective than `op` under that number.
        """
        try:
            store = self._world.store.clone()
            self.publish(store)
            threading.Event().wait(2 * INTERVAL)  # what the others did last may not be published yet
            found = {r: self._read(store, r) for r in range(self._size) if r != self._rank}
        except RuntimeError:
            return []
        other = {r: o for r, (s, o) in found.items() if s == seq and o != op}
        if other:
            raise ContractError(f"collective #{seq} is {op} on rank {self._rank} of the group, but {other} elsewhere")
        return [r for r, (s, _) in found.items() if s < seq]

    def _read(self, store: Any, rank: int) -> tuple[int, str]:
        key = f"{self._key}/{rank}"
        if not store.check([key]):
            return 0, ""
        seq, _, op = store.get(key).decode().partition(" ")
        return int(seq), op


class Progress:
    """Publishes the counts of all groups of this process, in a thread of its own."""

    _current: Progress | None = None

    def __init__(self, world: Any) -> None:
        self.world = world
        self.store: Any = dist.PrefixStore(  # type: ignore[attr-defined]
            "hal.progress", dist.distributed_c10d._get_default_store()
        )
        self.groups: list[GroupProgress] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="hal-progress", daemon=True)
        self._thread.start()
        # A thread that is inside the store's C++ code when the interpreter ends would abort the process.
        atexit.register(self._end)

    @classmethod
    def of_world(cls) -> Progress:
        """The one of the present default process group."""
        if cls._current is None or cls._current.world is not dist.group.WORLD:
            if cls._current is not None:
                cls._current._end()
            cls._current = cls(dist.group.WORLD)
        return cls._current

    def unheard(self, rank: int, size: int, seconds: float) -> list[int]:
        """Notes that this rank's work was lost, waits, and returns the ranks that have not noted the same.

        When one rank hangs, all that wait for it, directly or not, give up at about the same time: who has not is it.
        """
        try:
            store = self.store.clone()
            store.set(f"lost/{rank}", "")
            end = time.monotonic() + seconds
            while True:
                left = [r for r in range(size) if not store.check([f"lost/{r}"])]
                if not left or time.monotonic() > end:
                    return left
                time.sleep(0.1)
        except RuntimeError:
            return []

    def group(self, key: str, rank: int, size: int) -> GroupProgress:
        """Starts counting for one group, known to all its ranks by `key`."""
        made = GroupProgress(self, key, rank, size)
        self.groups.append(made)
        return made

    def _end(self) -> None:
        self._stop.set()
        self._thread.join(timeout=STORE_ANSWERS)

    def _loop(self) -> None:
        store: Any = None
        try:
            while not self._stop.wait(INTERVAL):
                # A connection of its own: another thread may be waiting on the first.
                store = store or self.store.clone()
                for group in list(self.groups):
                    group.publish(store)
        except RuntimeError:
            return  # the store went away with the job
