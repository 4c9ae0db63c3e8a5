"""Helpers of these tests that are not fixtures."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hal
from hal.backends.cuda import compile
from hal.backends.cuda.simulator.build import find_compiler
from hal.backends.cuda.simulator.graph import reads_on_host


def need_compiler() -> None:
    try:
        find_compiler()
    except hal.BackendUnavailable as error:
        pytest.skip(str(error))


def run_python(
    code: str, *, env: dict[str, str] | None = None, timeout: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a separate process."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=timeout)


def planted(name: str, old: str, new: str) -> dict[str, str]:
    """The text of a kernel file with one change, by its name."""
    text = (compile.KERNELS / name).read_text()
    assert text.count(old) >= 1, f"{name} no longer contains {old!r}; plant the fault elsewhere"
    return {name: text.replace(old, new, 1)}


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects, within a `with` block, the operations that would make the host wait for a GPU: see `made`.

    On the simulator tensors are on the host, so that no wait happens. `.tolist()`, `.numpy()` and `.cpu()` do not reach
    torch's dispatcher there, and are counted as functions. Not seen: copies from pageable memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[str] = []
        self.operations = 0
        self._functions = _Functions(self.made)

    def __enter__(self) -> HostReads:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.operations += 1
        if reads_on_host(func, args, kwargs or {}):
            self.made.append(name)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):  # type: ignore[no-untyped-call]
    def __init__(self, made: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "cpu", "__array__"):
            self._made.append(name)
        return func(*args, **(kwargs or {}))
