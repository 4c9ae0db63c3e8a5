"""The thread that publishes the collectives a rank has started: its store accesses, and process exit meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hal.comm import watchdog

ENDING = """
import os, threading
import torch.distributed as dist
from types import SimpleNamespace
from hal.comm import watchdog

write_started = threading.Event()

class Slow:
    def clone(self):
        return self
    def set(self, key, value):
        write_started.set()
        threading.Event().wait(1.0)
        os.write(1, f"{key} = {value}".encode())

dist.PrefixStore = lambda prefix, store: store
dist.distributed_c10d._get_default_store = Slow
watchdog.INTERVAL = 0.01
group = watchdog.Progress(None).group("world", 0, 2)
group.arrive("barrier")
write_started.wait()
"""


def test_exit_waits_for_a_pending_write_to_the_store() -> None:
    """A thread that returns from the store's C++ code after the interpreter has shut down aborts the process."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "world/0 = 1 barrier"), done.stderr


def test_a_process_that_ends_at_once_opens_no_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clones: list[Any] = []
    store = SimpleNamespace(clone=lambda: clones.append(None) or SimpleNamespace(set=lambda key, value: None))
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, parent: parent)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    progress = watchdog.Progress(None)
    progress.group("world", 0, 2).arrive("barrier")
    progress._end()
    assert not clones
    monkeypatch.setattr(watchdog, "INTERVAL", 0.01)
    progress = watchdog.Progress(None)
    group = progress.group("world", 0, 2)
    group.arrive("barrier")
    deadline = time.monotonic() + 30
    while group.published != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    progress._end()
    assert len(clones) == 1
