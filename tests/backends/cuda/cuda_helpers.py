"""Helpers of these tests that are not fixtures."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import hal
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


def sanitizer_environment() -> dict[str, str]:
    """Environment of a process that can load a library built with AddressSanitizer; skips where there is none."""
    need_compiler()
    libraries = [
        subprocess.run([*find_compiler(), f"-print-file-name=lib{n}.so"], check=True, capture_output=True, text=True)
        for n in ("asan", "ubsan")
    ]
    paths = [done.stdout.strip() for done in libraries]
    if not all(os.path.isabs(p) for p in paths):
        pytest.skip("the C++ compiler brings no libasan.so and libubsan.so to preload")
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(paths),
        "HAL_CUDA_SANITIZE": "address,undefined",
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
