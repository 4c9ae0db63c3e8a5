"""Device checks of features that the CUDA simulator lacks: CUDA graphs, streams, threads, memory, events.

A check is a function that returns a description of the problem, or "" if there is none. Exceptions are problems, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hal
from hal import Sample, TensorSpec, ops
from hal.testing import replay
from hal.testing.calls import backward, build, tensors, upstream
from hal.testing.calls import run as call
from hal.testing.comparison import equal_bits

DTYPES = (torch.bfloat16, torch.float32)
MIB = 2**20


def outcome(check: Callable[[], str]) -> str:
    """The problem that a check finds, in one line."""
    try:
        return check()
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def checks(backend: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    """All checks by name, for `backend`, an active Cuda."""
    for op in hal.OPS.values():
        for impl in backend.implementations(op):
            yield f"graph of {op.name} {impl.id}", partial(_graph, backend, op, impl)
    for dtype in DTYPES:
        yield f"flex with a mask, {str(dtype).removeprefix('torch.')}", partial(_mask, dtype)
    yield "kernels in a new thread", partial(_thread, backend)
    yield "a stream beside the current one", partial(_stream, backend)
    yield "memory statistics", partial(_memory, backend)
    yield "events and ranges", partial(_events, backend)


def _arguments(backend: Any, op: Any, impl: Any) -> Callable[[], tuple[dict[str, Any], bool]]:
    """A function that builds new arguments of the first edge case that `impl` accepts, and returns whether it has
    gradients. Raises HalError if `impl` accepts no edge case."""
    for dtype in DTYPES:
        for sample in op.edge_cases():
            arguments = build(op, sample, dtype, backend.device())
            sizes = [t.numel() for t in arguments.values() if isinstance(t, Tensor)]
            if op.tol.get(dtype) and all(sizes) and not impl.refusals(op.Call(**arguments)):
                return lambda: (build(op, sample, dtype, backend.device()), bool(op.grads) and sample.grad)
    raise hal.HalError("this implementation accepts none of the kit's calls")


def _results(op: Any, impl: Any, arguments: dict[str, Any], with_grad: bool, dys: list[Tensor]) -> list[Tensor]:
    """Everything that one call returns, including gradients.

    dys: the output gradients. The first call fills the list, so that further calls use the same ones.
    """
    outcome = call(op, impl.call, arguments, with_grad)
    dys[:] = dys or [dy.to(outcome.differentiable[i]) for i, dy in enumerate(upstream(outcome.differentiable, 1))]
    grads = backward(outcome, dys) if with_grad else {}
    return [*outcome.outputs.values(), *(g for g in grads.values() if g is not None)]


def _graph(backend: Any, op: Any, impl: Any) -> str:
    """Forward and backward, captured and replayed, give the same bits as a direct call."""
    make = _arguments(backend, op, impl)
    dys: list[Tensor] = []
    expected = _results(op, impl, *make(), dys)
    arguments, with_grad = make()
    repeat = backend.capture(lambda: _results(op, impl, arguments, with_grad, dys))
    # The capture has executed the call once, which matters for an op that writes in place.
    for (_, _, x), (_, _, original) in zip(tensors(arguments), tensors(make()[0])):
        x.detach().copy_(original)
    captured = repeat()
    backend.synchronize()
    return "" if all(map(equal_bits, captured, expected)) else "the graph's results differ in bits from the call's"


def _mask(dtype: torch.dtype) -> str:
    """cuda/flex with a mask and fully masked rows. It declines the kit's calls with masks, which are shorter."""
    lengths, window = (150, 140), {"pre_tokens": 60, "next_tokens": 3}
    q, k = TensorSpec((2, 4, lengths[0], 64)), TensorSpec((2, 2, lengths[1], 64))
    mask = TensorSpec((2, 1, *lengths), "bool", p=0.4, dtype=torch.bool)
    replay(
        ops.flash_attention,
        Sample((q, k, k), {"layout": "BNSD", "mask": mask, **window}),
        dtype,
        implementation="cuda/flex",
    )
    return ""


def _swiglu(backend: Any) -> Callable[[], Tensor]:
    """The forward and backward pass of a HAL kernel."""
    x = torch.randn(64, 256, device=backend.device(), dtype=torch.bfloat16).requires_grad_()

    def both() -> Tensor:
        y = ops.swiglu(x)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    return both


def _thread(backend: Any) -> str:
    both = _swiglu(backend)
    expected = both()
    results: list[Tensor] = []  # stays empty if the thread raises
    thread = threading.Thread(target=lambda: results.append(both()))
    thread.start()
    thread.join()
    return "" if results and equal_bits(results[0], expected) else "a kernel fails in a new thread"


def _stream(backend: Any) -> str:
    both = _swiglu(backend)
    expected = both()
    with backend.stream():
        result = both()
    return "" if equal_bits(result, expected) else "results differ on another stream"


def _memory(backend: Any) -> str:
    backend.reset_peak_memory()
    before = backend.memory_stats()
    x = torch.empty(64 * MIB, dtype=torch.uint8, device=backend.device())
    during = backend.memory_stats()
    del x
    after = backend.memory_stats()
    growth = [during["allocated"] - before["allocated"], after["peak"] - before["allocated"]]
    if any(g < 64 * MIB for g in growth) or after["allocated"] != before["allocated"]:
        return f"64 MiB show as {growth} bytes, and {after['allocated'] - before['allocated']} after they are freed"
    if not after["total"] >= after["reserved"] >= after["allocated"]:
        return f"not total >= reserved >= allocated: {dict(after)}"
    return ""


def _events(backend: Any) -> str:
    both = _swiglu(backend)
    with backend.profile_range("checked"):
        start = backend.event()
        both()
        end = backend.event()
    backend.synchronize()
    return "" if start.elapsed_time(end) > 0.0 else "no time passes between events"
