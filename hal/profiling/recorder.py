"""Records the spans of a `with` block, and every call of an op in it, forward and backward.

On a backend whose calls return before their work is done, the recorder waits for the device before and after each call,
so that times are those of the device's work; the calls then cannot overlap. `wait=False` leaves them alone: the times
are then those of the host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor

from .. import spans
from ..core.backend import Backend, Impl
from ..core.dispatch import candidates, wrapped_calls
from ..spans import Span
from .summary import rows, table
from .work import backward_flops, bytes_of, forward_flops, matrices


class Recorder:
    """`with Recorder(hal.backend()) as recorder: ...`; then `recorder.spans`, `recorder.rows()`, `recorder.table()`.

    A second use adds to the first one's spans. Collectives are recorded at the host.
    """

    def __init__(self, backend: Backend, *, wait: bool = True) -> None:
        self.backend, self.spans = backend, list[Span]()
        self.waits = wait and backend.capabilities().asynchronous
        self.refusals: dict[tuple[str, str], dict[str, str]] = {}
        """(op, implementation) -> why those that come before it refused its calls, by their ids."""
        self._synchronize: Callable[[], None] = backend.synchronize if self.waits else lambda: None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        self._stack = contextlib.ExitStack()
        self._synchronize()
        self._stack.enter_context(spans.listening(self.spans.append))
        self._stack.enter_context(wrapped_calls(self._around))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._synchronize()
        self._stack.close()

    def rows(self) -> list[dict[str, Any]]:
        """One row per op, implementation and direction: see `summary.rows`."""
        return rows(self.spans, self.refusals)

    def table(self) -> str:
        """The rows as text, the largest share of the time first."""
        return table(self.rows())

    def _around(self, impl: Impl, call: Callable[..., Any]) -> Callable[..., Any]:
        op, range_name = impl.op, f"{impl.op.name} ({impl.id})"

        def recorded(*args: Any, **kwargs: Any) -> Any:
            given = op.Call(*args, **kwargs)
            values = [getattr(given, name) for name in op.schema.parameters]
            self._note_refusals(impl, given)
            flops, read = forward_flops(op.name, given), bytes_of(values)
            dtype = next((str(v.dtype).removeprefix("torch.") for v in values if isinstance(v, Tensor)), "")
            self._synchronize()
            begin = time.perf_counter_ns()
            with self.backend.profile_range(range_name):
                result = call(*args, **kwargs)
                self._synchronize()
            facts = {"impl": impl.id, "direction": "forward", "dtype": dtype, "flops": flops}
            spans.deliver("op", op.name, begin, {**facts, "bytes": read + bytes_of([result])})
            backward = _Backward(self, impl, flops, read, dtype)
            backward.watch(result, values)
            return result

        return recorded

    def _note_refusals(self, impl: Impl, call: Any) -> None:
        """Notes why the preferred implementations did not take a call, once per op and implementation."""
        key = impl.op.name, impl.id
        if key in self.refusals:
            return
        reasons: dict[str, str] = {}
        for other in candidates(impl.op):
            if other.id == impl.id:
                break
            reasons[other.id] = "; ".join(other.refusals(call))
        self.refusals[key] = reasons


class _Backward:
    """Times the autograd nodes that one call has created: one for an implementation with a backward function, several
    for one that torch differentiates."""

    def __init__(self, recorder: Recorder, impl: Impl, flops: float, read: int, dtype: str) -> None:
        self.recorder, self.impl, self.flops, self.read, self.dtype = recorder, impl, flops, read, dtype
        self._first = True

    def watch(self, result: Any, values: list[Any]) -> None:
        """Adds hooks to the nodes between the call's results and its inputs."""
        outputs = result if isinstance(result, tuple) else (result,)
        nodes = [t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn is not None]
        if not nodes:
            return
        flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])]
        inputs = {v.grad_fn for v in flat if isinstance(v, Tensor)}
        visited: set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node in visited or node in inputs or node.name() == "torch::autograd::AccumulateGrad":
                continue
            visited.add(node)
            nodes += [n for n, _ in node.next_functions if n is not None]
        for node in visited:
            self._hook(node)

    def _hook(self, node: Any) -> None:
        started: list[tuple[int, contextlib.AbstractContextManager[None], int, set[int]]] = []

        def before(grad_outputs: Any) -> None:
            self.recorder._synchronize()
            entered = self.recorder.backend.profile_range(f"{self.impl.op.name} ({self.impl.id}), backward")
            entered.__enter__()
            given = {t.data_ptr() for t in grad_outputs if isinstance(t, Tensor)}
            started.append((time.perf_counter_ns(), entered, bytes_of(grad_outputs), given))

        def after(grad_inputs: Any, grad_outputs: Any) -> None:
            self.recorder._synchronize()
            begin, entered, upstream, given = started.pop()
            entered.__exit__(None, None, None)
            facts: dict[str, Any] = {"impl": self.impl.id, "direction": "backward", "dtype": self.dtype}
            if self._first:  # the work of the call is counted with the first of its nodes
                flops = backward_flops(self.impl.op.name, self.flops, matrices(grad_inputs))
                # A gradient that is the upstream one moves nothing, e.g. that of a residual addition.
                new = bytes_of(g for g in grad_inputs if isinstance(g, Tensor) and g.data_ptr() not in given)
                facts |= {"flops": flops, "bytes": self.read + upstream + new if new else 0}
                self._first = False
            else:
                facts |= {"flops": 0.0, "bytes": 0, "part": True}
            spans.deliver("op", self.impl.op.name, begin, facts)

        node.register_prehook(before)
        node.register_hook(after)
