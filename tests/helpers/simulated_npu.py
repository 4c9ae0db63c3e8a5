"""The npu backend on its simulator, for tests."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal.backends.npu import Npu


def build() -> Npu | None:
    """The backend, built, or None without torch_npu. Device memory is filled with NaN when it is allocated."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    from hal.backends.npu import Npu

    before = dict(os.environ)
    backend = Npu(simulate=True, poison=True)
    backend.build()
    os.environ.clear()  # variables that it sets for child processes must not reach other tests
    os.environ.update(before)
    return backend
