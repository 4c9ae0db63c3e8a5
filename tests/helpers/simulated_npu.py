"""The npu backend on its simulator, for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal.backends.npu import Npu


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Removes the variables that a backend sets for child processes, which must not reach other tests."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def build() -> Npu | None:
    """The backend, built, or None without torch_npu. Device memory is filled with NaN when it is allocated."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    from hal.backends.npu import Npu

    with restored_environment():
        backend = Npu(simulate=True, poison=True)
        backend.build()
    return backend
