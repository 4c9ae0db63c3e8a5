"""Device checks of what the kit does not cover: CUDA graphs, streams, threads, memory, events.

A check is a function that returns a description of the problem, or "" if there is none. Exceptions are problems, too.
A rehearsal runs those whose features the simulator has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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
from hal.testing.sharded_processes import OPS as BETWEEN_PROCESSES

DTYPES = (torch.bfloat16, torch.float32)
MIB = 2**20


class CannotBeChecked(Exception):
    """An implementation says that it is not available here, or that it refuses calls that are captured in a graph."""


def outcome(check: Callable[[], str]) -> dict[str, str]:
    """The problem that a check finds, in one line, or why it cannot be made here."""
    try:
        return {"problem": check()}
    except CannotBeChecked as refusal:
        return {"absent": str(refusal).splitlines()[0]}
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}".strip().splitlines()[0]}


@dataclass(frozen=True)
class Check:
    """needs: the feature without which it cannot run, a key of Gpu.lacks; "" for none."""

    name: str
    needs: str
    run: Callable[[], str]


def checks(backend: Any) -> Iterator[Check]:
    """All checks, for `backend`, an active Cuda."""
    for op in hal.OPS.values():
        for impl in backend.implementations(op):
            if impl.composed or op.name not in BETWEEN_PROCESSES:
                yield Check(f"graph of {op.name} {impl.id}", "", partial(_graph, backend, op, impl))
    for dtype in DTYPES:
        yield Check(f"flex with a mask, {str(dtype).removeprefix('torch.')}", "", partial(_mask, dtype))
    yield Check("kernels in a new thread", "", partial(_thread, backend))
    yield Check("a stream beside the current one", "", partial(_stream, backend))
    yield Check(LATE, "streams", partial(_late_producers, backend))
    yield Check("memory statistics", "memory", partial(_memory, backend))
    yield Check(NO_SCORES, "memory", partial(_no_scores, backend))
    yield Check("events and ranges", "clocks", partial(_events, backend))
    yield Check(NO_READS, "streams", partial(_no_host_reads, backend))
    yield Check(RECORDED, "", partial(_recorded_steps, backend))
    yield Check(FLOAT32_SUMS, "cuBLAS", partial(_float32_sums, backend))


LATE = "streams wait for late producers"
NO_SCORES = "attention with dropout stores no scores"
NO_READS = "a training step makes no host synchronisation"
RECORDED = "recorded training steps"
FLOAT32_SUMS = "16-bit weight gradients are added in float32"
"""Names of checks that claims of the docs refer to (verdict.py)."""


def _arguments(backend: Any, op: Any, impl: Any) -> Callable[[], tuple[dict[str, Any], bool]]:
    """A function that builds new arguments of the first edge case that `impl` accepts, and returns whether it has
    gradients. Raises CannotBeChecked if `impl` is not available here, HalError if it accepts no edge case."""
    for dtype in DTYPES:
        for sample in op.edge_cases():
            arguments = build(op, sample, dtype, backend.device())
            sizes = [t.numel() for t in arguments.values() if isinstance(t, Tensor)]
            if not op.tol.get(dtype) or not all(sizes):
                continue
            refusals = impl.refusals(op.Call(**arguments))
            if not refusals:
                return lambda: (build(op, sample, dtype, backend.device()), bool(op.grads) and sample.grad)
            for reason in refusals:
                if isinstance(reason, hal.Unavailable):
                    raise CannotBeChecked(reason)
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

    def once() -> list[Tensor]:
        if reasons := impl.refusals(op.Call(**arguments)):
            raise CannotBeChecked("; ".join(reasons))
        return _results(op, impl, arguments, with_grad, dys)

    repeat = backend.capture(once)
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


DELAY = 100_000_000
"""Cycles for which a stream is kept busy so that what follows on it is late: about 60 milliseconds."""


def _delay() -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(DELAY)  # type: ignore[no-untyped-call]


def _partial_stream(enters: bool, leaves: bool) -> AbstractContextManager[Any]:
    """Backend.stream with a fault: it waits for earlier work only if `enters`, and later work for it if `leaves`."""

    @contextmanager
    def stream() -> Iterator[None]:
        outer, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if enters:
            side.wait_stream(outer)
        with torch.cuda.stream(side):
            yield
        if leaves:
            outer.wait_stream(side)

    return stream()


def _late_producers(backend: Any) -> str:
    """Kernels read what late kernels of other streams write, in both directions; without a wait they do not, which
    shows that the delay is long enough for a missing one to be noticed."""
    faults = {"entering": partial(_partial_stream, False, True), "leaving": partial(_partial_stream, True, False)}
    for direction, faulty in faults.items():
        if _in_order(backend, faulty):
            return f"a missing wait when {direction} a stream goes unnoticed: the delay of {DELAY} cycles is too short"
    return "" if _in_order(backend, backend.stream) else "a kernel ran before the late kernel whose result it reads"


def _in_order(backend: Any, stream: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Whether three kernels, the second one on another stream, give what they give one after the other; the first two
    are late."""
    # Other values in every call, and the late kernels first: freed memory may hold the results of earlier calls.
    x = torch.randn(256, 1024, device=backend.device(), dtype=torch.bfloat16)
    with torch.no_grad():
        backend.synchronize()
        for _ in range(2):  # later than the second kernel would be if its stream did not wait
            _delay()
        first = ops.swiglu(x)
        with stream():
            _delay()
            second = ops.swiglu(first)
        third = ops.swiglu(second)
        backend.synchronize()
        return equal_bits(third, ops.swiglu(ops.swiglu(ops.swiglu(x))))


def _no_scores(backend: Any) -> str:
    """Memory of attention with dropout, forward and backward, at a length whose scores would be most of it."""
    n, s, d = 4, 4096, 64
    shape, scores = (1, n, s, d), n * s * s * 2
    q, k, v = (torch.randn(shape, device=backend.device(), dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    backend.reset_peak_memory()
    before = backend.memory_stats()["allocated"]
    out: Any = ops.flash_attention(q, k, v, layout="BNSD", next_tokens=0, dropout_p=0.1, rng=hal.Rng(1))
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    used = backend.memory_stats()["peak"] - before
    return f"it used {used / MIB:.0f} MiB; the scores are {scores / MIB:.0f}" if used > scores / 2 else ""


def _trainer(backend: Any, **options: Any) -> Any:
    """The trainer of a small model in bfloat16 with two microbatches per step."""
    from ..parallel.layout import config_of, trainer_of

    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "train_iters": 9}
    batch = {"micro_batch_size": 2, "global_batch_size": 4, "bf16": True, "backend": backend.name}
    return trainer_of(config_of({**sizes, **batch, **options}))


def _recorded_steps(backend: Any) -> str:
    """Steps with --cuda-graphs, and the same ones without. Attention may add gradients in another order, which changes
    losses by less than other tokens or weights would."""
    options = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "lr": 1e-2, "lr_decay_style": "cosine"}
    plain, recorded = (_trainer(backend, **options, cuda_graphs=graphs) for graphs in (False, True))
    for _ in range(4):
        expected, found = plain.step(), recorded.step()
        if abs(found.loss - expected.loss) > 1e-3:
            return f"iteration {found.iteration}: the loss is {found.loss}, without a graph {expected.loss}"
    return ""


def _no_host_reads(backend: Any) -> str:
    """Steps of the trainer while torch raises an error for every call that makes the host wait."""
    trainer = _trainer(backend)
    trainer.step()  # compiles, loads and allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.advance()
        trainer.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    steps = len(list(trainer.results()))
    return "" if steps == 2 else f"{steps} results of two steps"


def _float32_sums(backend: Any) -> str:
    """A product of 16 bits that a rounded sum would lose: 1 + 2^-9 is no bfloat16."""
    x, dy = (torch.ones(16, 16, device=backend.device(), dtype=torch.bfloat16) for _ in range(2))
    total = torch.zeros(16, 16, device=backend.device())
    ops.linear_wgrad(x * (1 + 2.0**-7), dy * (1 + 2.0**-7), total)
    exact = 16 * (1 + 2.0**-7) ** 2
    return "" if bool((total == exact).all()) else f"{float(total[0, 0])!r} in the place of {exact!r}"


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
