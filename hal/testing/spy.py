"""A backend that wraps another one and records which ops run on it, to test what a model uses without a device.

Everything else is passed on to the wrapped backend, including attributes that its kernels look up on `hal.backend()`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hal.comm.contract import Comm
from hal.core.backend import Backend, Impl, Probe
from hal.core.call import Call
from hal.core.capabilities import Capabilities
from hal.core.op import Op
from hal.errors import HalError


class Spy(Backend):
    """Records every call that an implementation of `inner` accepts, in order.

    >>> spy = Spy(hal.backend())                    # doctest: +SKIP
    >>> with hal.activated(spy): step()             # doctest: +SKIP
    >>> spy.counts()                                # doctest: +SKIP
    Counter({'linear': 17, 'layer_norm': 5, ...})
    """

    name = "spy"

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        """(op name, implementation id) of every call."""
        self.impls = {name: [self._recorded(i) for i in impls] for name, impls in inner.impls.items()}  # type: ignore[misc]
        self.simulated, self.deterministic = inner.simulated, inner.deterministic

    def _recorded(self, impl: Impl) -> Impl:
        note, record, call = (impl.op.name, impl.id), self.calls.append, impl.call

        def recorded(*args: Any, **kwargs: Any) -> Any:
            record(note)
            return call(*args, **kwargs)

        return dataclasses.replace(impl, call=recorded)

    def counts(self) -> Counter[str]:
        """Calls by op name."""
        return Counter(name for name, _ in self.calls)

    def clear(self) -> None:
        """Deletes the recorded calls."""
        self.calls.clear()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, e.g. while unpickling
            raise AttributeError(name)
        return getattr(self.inner, name)

    # Attributes that the base class defines are not looked up by __getattr__, so they are passed on one by one.

    def probe(self) -> Probe:
        return self.inner.probe()

    def device(self, index: int = 0) -> torch.device:
        return self.inner.device(index)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def local_index(self) -> int:
        return self.inner.local_index()

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> Comm:
        return self.inner.comm(ranks, timeout=timeout)

    def build(self) -> None:
        self.inner.build()

    def memory_stats(self) -> Mapping[str, int]:
        return self.inner.memory_stats()

    def reset_peak_memory(self) -> None:
        self.inner.reset_peak_memory()

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    def device_failure(self, error: RuntimeError) -> HalError | None:
        return self.inner.device_failure(error)

    def event(self) -> object:
        return self.inner.event()

    def wait(self, event: object) -> None:
        self.inner.wait(event)

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        return self.inner.capture(function)

    def memory_pool(self) -> AbstractContextManager[object]:
        return self.inner.memory_pool()

    def stream(self) -> AbstractContextManager[object]:
        return self.inner.stream()

    def profile_range(self, name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.inner.profile_range(name)

    def profiler(self, folder: str, name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.inner.profiler(folder, name)

    def preference(self, op: Op[Any, Any]) -> Callable[[Call], tuple[str, ...]] | None:
        return self.inner.preference(op)

    def options(self) -> Mapping[str, Any]:
        return self.inner.options()
