"""The implementation under test, in one dtype, called through the dispatcher.

Inside `with subject:` the backend is active with this implementation as the op's only candidate, so a call is executed
like a user's call (check, why_not, autograd), and `subject.calls` counts how often the implementation was executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hal.core.backend import Backend, Impl
from hal.core.dispatch import activated
from hal.core.op import Op, Sample

from .calls import code
from .comparison import equal_bits


class Failure(AssertionError):
    """A requirement that an implementation does not meet, with a call that reproduces the failure."""

    def __init__(
        self,
        subject: Subject,
        message: str,
        sample: Sample | None = None,
        *,
        error: float = float("inf"),
        check: str = "",
        ranks: int = 0,
    ) -> None:
        self.subject, self.message, self.sample, self.error = subject, message, sample, error
        self.check, self.ranks = check, ranks
        super().__init__(f"{subject}: {message}")

    def snippet(self) -> str:
        """Python code that repeats the failing call and fails in the same way; empty if there is no such call."""
        s = self.subject
        if self.sample is None:
            return ""
        options = "".join(f", {k}={v!r}" for k, v in s.backend.options().items() if v is not None)
        extra = (f", check={self.check!r}" if self.check else "") + (f", ranks={self.ranks}" if self.ranks else "")
        return (
            "import hal, torch\n"
            "from hal import DtypeSpec, Rng, Sample, TensorSpec, ops\n"
            "from hal.testing import replay\n"
            f"hal.use({s.backend.name!r}{options})\n"
            f"sample = {code(self.sample)}\n"
            f"replay({op_source(s.op)}, sample, {s.dtype}, implementation={s.impl.id!r}{extra})\n"
        )


def op_source(op: Op[Any, Any]) -> str:
    """An expression for the op: `ops.NAME`, or a look-up for an op defined elsewhere."""
    return f"ops.{op.name}" if op.__module__.startswith("hal.ops") else f"hal.OPS[{op.name!r}]"


class Subject:
    """One implementation of one op of one backend, in one dtype."""

    def __init__(self, backend: Backend, impl: Impl, dtype: torch.dtype) -> None:
        self.backend, self.impl, self.dtype = backend, impl, dtype
        self.op: Op[Any, Any] = impl.op
        self.tol = self.op.tol[dtype]
        self.waiver, self.waiver_reason = impl.waivers.get(dtype, (1.0, ""))
        self.calls = 0
        self.worst = 0.0
        self.release_seconds = 2.0  # in which the memory of a finished call must be freed
        self.device = backend.device(0)
        capabilities = backend.capabilities()
        self.deterministic, self.stored = capabilities.deterministic, capabilities.dtypes
        self._stack = contextlib.ExitStack()

    def __str__(self) -> str:
        return f"{self.op.name} {str(self.dtype).removeprefix('torch.')} {self.impl.id}"

    def repeats(self, first: Tensor, second: Tensor) -> bool:
        """Whether two results of equal calls have the same bits, as a deterministic backend's have."""
        return not self.deterministic or equal_bits(first, second)

    def fail(self, message: str, sample: Sample | None, **details: Any) -> Failure:
        return Failure(self, message, sample, **details)

    def __enter__(self) -> Subject:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.impl.call(*args, **kwargs)

        candidate = dataclasses.replace(self.impl, call=counted)
        # A composition calls other ops.
        others = self.backend.impls if self.impl.composed else {}
        self._stack.enter_context(only(self.backend, {**others, self.op.name: [candidate]}))
        self._stack.enter_context(activated(self.backend))
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def only(backend: Backend, impls: Mapping[str, list[Impl]]) -> Iterator[None]:
    """Replaces the backend's implementations, on the instance itself, because kernels may look at that."""
    before = vars(backend).get("impls")
    backend.impls = dict(impls)  # type: ignore[misc]
    try:
        yield
    finally:
        if before is None:
            del backend.impls
        else:
            backend.impls = before  # type: ignore[misc]
