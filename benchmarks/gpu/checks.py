"""What the CUDA simulator cannot show, checked on the device: CUDA graphs, streams, threads, memory, events.

Every check is a name and what is wrong, "" if nothing; an exception is what is wrong, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Sample, T, ops
from hal.testing import replay
from hal.testing.calls import backward, build, upstream
from hal.testing.calls import run as call
from hal.testing.comparison import equal_bits

DTYPES = (torch.bfloat16, torch.float32)
MIB = 2**20


def run(backend: Any) -> dict[str, str]:
    """All checks on `backend`, a Cuda that is in use."""
    return {name: outcome(check) for name, check in checks(backend)}


def outcome(check: Callable[[], str]) -> str:
    """What is wrong according to a check."""
    try:
        return check()
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def checks(backend: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, check) of everything."""
    for op in hal.OPS.values():
        for impl in backend.impls.get(op.name, ()):
            yield f"graph of {op.name} {impl.id}", lambda op=op, impl=impl: _graph(backend, op, impl)
    for dtype in DTYPES:
        yield f"flex with a mask, {str(dtype).removeprefix('torch.')}", lambda dtype=dtype: _mask(dtype)
    yield "kernels in a new thread", lambda: _thread(backend)
    yield "a stream beside the current one", lambda: _stream(backend)
    yield "memory statistics", lambda: _memory(backend)
    yield "events and ranges", lambda: _events(backend)


def _arguments(backend: Any, op: Any, impl: Any) -> Callable[[], tuple[dict[str, Any], bool]]:
    """Makes the arguments of the first written-down call that `impl` takes, anew each time; whether it has gradients.

    Raises HalError if it takes none.
    """
    for dtype in DTYPES:
        for sample in op.directed():
            given = build(op, sample, dtype, backend.device())
            sizes = [t.numel() for t in given.values() if isinstance(t, Tensor)]
            if op.tol.get(dtype) and all(sizes) and not impl.why_not(**given):
                return lambda: (build(op, sample, dtype, backend.device()), bool(op.grads) and sample.grad)
    raise hal.HalError("no call of the kit's is one that this implementation takes")


def _results(op: Any, impl: Any, arguments: dict[str, Any], with_grad: bool, dys: list[Tensor]) -> list[Tensor]:
    """Everything that one call gives, its gradients included. dys is filled by the first of several calls."""
    outcome = call(op, impl.call, arguments, with_grad)
    dys[:] = dys or [dy.to(outcome.differentiable[i]) for i, dy in enumerate(upstream(outcome.differentiable, 1))]
    grads = backward(outcome, dys) if with_grad else {}
    return [*outcome.outputs.values(), *(g for g in grads.values() if g is not None)]


def _graph(backend: Any, op: Any, impl: Any) -> str:
    """Forward and backward, captured and replayed, give the bits that they give when they are called."""
    make, dys = _arguments(backend, op, impl), []  # type: ignore[var-annotated]
    expected = _results(op, impl, *make(), dys)
    with backend.stream():
        _results(op, impl, *make(), dys)
    arguments, with_grad = make()
    backend.synchronize()
    with backend.capture() as graph:
        found = _results(op, impl, arguments, with_grad, dys)
    graph.replay()
    backend.synchronize()
    return "" if all(map(equal_bits, found, expected)) else "the graph's results differ in bits from the call's"


def _mask(dtype: torch.dtype) -> str:
    """The kit's calls with masks are too short for cuda/flex: one that is not, with rows that see nothing."""
    lengths, window = (150, 140), {"pre_tokens": 60, "next_tokens": 3}
    q, k = T((2, 4, lengths[0], 64)), T((2, 2, lengths[1], 64))
    mask = T((2, 1, *lengths), "bool", p=0.4, dtype=torch.bool)
    replay(
        ops.flash_attention,
        Sample((q, k, k), {"layout": "BNSD", "mask": mask, **window}),
        dtype,
        implementation="cuda/flex",
    )
    return ""


def _swiglu(backend: Any) -> Callable[[], Tensor]:
    """A kernel's forward and backward."""
    x = torch.randn(64, 256, device=backend.device(), dtype=torch.bfloat16).requires_grad_()

    def both() -> Tensor:
        y = ops.swiglu(x)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    return both


def _thread(backend: Any) -> str:
    both, found = _swiglu(backend), []
    expected = both()
    thread = threading.Thread(target=lambda: found.append(both()))
    thread.start()
    thread.join()
    return "" if found and equal_bits(found[0], expected) else "a kernel that runs in a new thread fails there"


def _stream(backend: Any) -> str:
    both = _swiglu(backend)
    expected = both()
    with backend.stream():
        found = both()
    return "" if equal_bits(found, expected) else "results differ on another stream"


def _memory(backend: Any) -> str:
    backend.reset_peak_memory()
    before = backend.memory_stats()
    x = torch.empty(64 * MIB, dtype=torch.uint8, device=backend.device())
    during = backend.memory_stats()
    del x
    after = backend.memory_stats()
    grown = [during["allocated"] - before["allocated"], after["peak"] - before["allocated"]]
    if any(g < 64 * MIB for g in grown) or after["allocated"] != before["allocated"]:
        return f"64 MiB show as {grown} bytes, and {after['allocated'] - before['allocated']} after they are freed"
    return "" if after["total"] >= after["reserved"] >= after["allocated"] else f"no order in {dict(after)}"


def _events(backend: Any) -> str:
    both, start, end = _swiglu(backend), backend.event(), backend.event()
    with backend.profile_range("checked"):
        start.record()
        both()
        end.record()
    backend.synchronize()
    return "" if start.elapsed_time(end) > 0.0 else "no time passes between events"
