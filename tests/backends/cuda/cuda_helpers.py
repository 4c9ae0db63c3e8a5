"""Helpers of these tests that are not fixtures."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hal
from hal.backends.cuda import compile
from hal.backends.cuda.simulator.build import find_compiler


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
