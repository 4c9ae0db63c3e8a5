"""The backend that a worker process measures. Suites use it to create a candidate's tensors.

In HAL's own processes it is also the active backend. In a peer's process it is only constructed, so that settings made
by `hal.use` cannot affect the peer.
"""

from __future__ import annotations

import torch

import hal

_backend: hal.Backend | None = None


def set_backend(backend: hal.Backend) -> None:
    """Called once, when the worker starts."""
    global _backend
    _backend = backend


def backend() -> hal.Backend:
    """The measured backend. Raises RuntimeError outside a worker process."""
    if _backend is None:
        raise RuntimeError("only a worker process of `hal bench` has a backend that is measured")
    return _backend


def device() -> torch.device:
    """The device of the candidates' tensors."""
    return backend().device()
