"""Checks of a backend's capabilities and optional methods: dtypes, streams, graphs and memory pools."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from hal.core.backend import Backend
from hal.core.dispatch import activated
from hal.core.op import OPS

from .parity_rows import Row

DEVICE = "device"
"""The name of these checks where names of ops are given."""

_ELEMENTS = 1 << 20


class _Wrong(Exception):
    """The backend lacks a behaviour that its capabilities declare."""


class _Declined(Exception):
    """The capability that a check is about is missing."""


def check_device(backend: Backend) -> Iterator[Row]:
    """One row per check; `dtype` is the name of the check."""
    checks: dict[str, Callable[[Backend], int]] = {
        "dtypes": _dtypes,
        "streams": _streams,
        "graphs": _graphs,
        "pools": _pools,
    }
    for name, check in checks.items():
        row = Row(DEVICE, name, backend.name, backend.simulated, "pass", 0, None)
        try:
            with activated(backend):
                row.samples = check(backend)
        except _Declined as declined:
            row.status, row.reasons = "declined", [str(declined)]
        except _Wrong as wrong:
            row.status, row.message = "fail", str(wrong)
        except Exception as error:
            row.status, row.message = "fail", f"raised {type(error).__name__}: {error}"
        yield row


def _dtypes(backend: Backend) -> int:
    """Tensors of every dtype of the capabilities are made, converted from float32, copied and read."""
    dtypes = sorted(backend.capabilities().dtypes, key=str)
    values = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])
    for dtype in dtypes:
        on_device = values.to(backend.device()).to(dtype)
        copied = torch.empty(5, dtype=dtype, device=backend.device())
        copied.copy_(on_device)
        read = copied.cpu().to(torch.float32)
        if copied.dtype != dtype or not torch.equal(read, values):
            raise _Wrong(f"{dtype}: {values.tolist()} was stored and {read.tolist()} was read")
    return len(dtypes)


def _streams(backend: Backend) -> int:
    """`wait` orders work between the current stream and another one, in both directions."""
    x = torch.arange(_ELEMENTS, dtype=torch.float32).to(backend.device())
    for repetition in range(1, 6):
        y = x
        for _ in range(6):
            y = y + x
        ready = backend.event()
        with backend.stream():
            backend.wait(ready)
            z = y * float(repetition)
            done = backend.event()
        backend.wait(done)
        total = (z - 7.0 * repetition * x).abs().max().item()
        if not total == 0.0:
            raise _Wrong(
                "a result of another stream was read before it was complete, or computed before its input was: "
                f"event() and wait() do not order the work (largest difference {total})"
            )
    return 5


def _graphs(backend: Backend) -> int:
    """Replaying a captured call reads the values that its inputs have at that time."""
    if not backend.capabilities().graphs:
        raise _Declined("capability graphs: no")
    norms = (OPS[name] for name in ("rms_norm", "layer_norm"))
    op = next((op for op in norms if backend.implementations(op)), None)
    if op is None:
        raise _Declined("no norm to record")
    x = torch.linspace(-1.0, 1.0, 64 * 32).reshape(64, 32).to(backend.device())
    parameters = [torch.ones(32, device=backend.device()) for _ in range(len(op.grads) - 1)]
    replay = backend.capture(lambda: op(x, *parameters))
    for factor in (2.0, 3.0):
        x.copy_(torch.linspace(factor, -1.0, 64 * 32).reshape(64, 32))
        repeated = replay().clone()
        if not torch.equal(repeated, op(x, *parameters)):
            raise _Wrong(f"{op.name}: a recorded call does not repeat with the new values of its input")
    return 2


def _pools(backend: Backend) -> int:
    """Memory of a pool is counted while it is used and returned after it is freed."""
    if not backend.capabilities().memory_pools:
        raise _Declined("capability memory_pools: no")
    before = backend.memory_stats().get("reserved", math.nan)
    with backend.memory_pool():
        x = torch.ones(16 * _ELEMENTS, device=backend.device())
        during = backend.memory_stats().get("reserved", math.nan)
        if x.sum().item() != x.numel():
            raise _Wrong("a tensor of a pool does not hold its values")
    del x
    after = backend.memory_stats().get("reserved", math.nan)
    if not (during >= before + 64 * _ELEMENTS and after <= before):
        raise _Wrong(f"reserved bytes before, in and after a pool: {before}, {during}, {after}; its memory must return")
    return 1
