"""Compiles the kernels and cuda_host.h with g++ into one library, cached, and runs kernels from it.

HAL_CUDA_SANITIZE=address,undefined builds it with those sanitizers (the process then needs libasan preloaded, see
docs/cuda-simulator.md). HAL_CUDA_SEED determines the order of threads. Tests inject faults by compiling modified copies
of the kernels' folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import hal
from hal import backend_tools

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "kernels"
_FLAGS = ["-std=c++17", "-fPIC", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
_FLAGS += ["-fno-math-errno", "-DHAL_SIMULATE"]


def find_compiler() -> list[str]:
    """The C++ compiler's command: `$CXX`, else g++, clang++ or c++. Raises BackendUnavailable if there is none."""
    return backend_tools.find_compiler("C++", "the CUDA simulator compiles the kernels for the CPU")


def contraction() -> list[str]:
    """Flags that contract products and sums into FMAs, as NVRTC does, if the processor has FMA.

    On x86-64 FMA must be enabled; aarch64 always has it.
    """
    try:
        has_fma = re.search(r"(?m)^flags\s*:.*\bfma\b", Path("/proc/cpuinfo").read_text()) is not None
    except OSError:
        has_fma = False
    return ["-ffp-contract=fast", *(["-mfma"] if has_fma else [])]


def library(kernels: Path = KERNELS) -> Path:
    """The compiled library of the kernels in a folder; compiles the files that are not cached.

    Raises BackendUnavailable when there is no compiler or it fails.
    """
    compiler, sanitize = find_compiler(), os.environ.get("HAL_CUDA_SANITIZE", "")
    flags = [*_FLAGS, *contraction(), "-O2"]
    if sanitize:
        flags += ["-fno-omit-frame-pointer", f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
    sources = [HERE / "runtime.cpp", *sorted(kernels.glob("*.cu"))]
    version = backend_tools.compiler_version(compiler)
    headers = [p.read_bytes() for p in [*sorted(kernels.glob("*.h")), HERE / "cuda_host.h"]]
    common = hashlib.sha256(b"\0".join([repr((compiler, version, flags)).encode(), *headers])).hexdigest()
    cache = backend_tools.cache_directory("cuda")
    objects = {s: cache / f"simulator-{s.stem}-{_digest(common.encode(), s.read_bytes())}.o" for s in sources}
    target = cache / f"simulator-{_digest(*(o.name.encode() for o in objects.values()))}.so"
    if not target.exists():
        with backend_tools.locked(cache / "simulator.lock"):
            if not target.exists():
                include = [f"-I{HERE}", f"-I{kernels}"]
                _build([*compiler, *flags, *include], {s: o for s, o in objects.items() if not o.exists()})
                part = target.with_suffix(".part")
                _run([*compiler, *flags, "-shared", *map(str, objects.values()), "-o", str(part)])
                os.rename(part, target)
    return target


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _build(compile: list[str], objects: dict[Path, Path]) -> None:
    """Compiles every source to its object; an object under its final name is complete."""
    if len(objects) > 1:
        backend_tools.announce(f"compiling the CUDA kernels for the CPU ({len(objects)} files) ...")

    def compile_one(source: Path) -> None:
        part = objects[source].with_suffix(".part")
        _run([*compile, "-x", "c++", "-c", str(source), "-o", str(part)])
        os.rename(part, objects[source])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, objects))


def _run(command: list[str]) -> None:
    backend_tools.run_compiler(command, "the CUDA kernels")


class Simulator:
    """The engine that runs kernels on the CPU. Tensors are CPU tensors, and a launch returns when it is done."""

    device_type = "cpu"
    multiprocessors = 2  # grids are small because blocks take time; two are enough to test the distribution of rows

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        self._launch = lib.hal_sim_launch
        u32 = ctypes.c_uint32
        self._launch.argtypes = [ctypes.c_char_p, u32, u32, u32, u32, ctypes.c_char_p, ctypes.c_uint64]
        self._launch.restype = ctypes.c_char_p
        seed = os.environ.get("HAL_CUDA_SEED", "1")
        if not seed.isdigit():
            raise hal.HalError(f"HAL_CUDA_SEED must be a whole number, got {seed!r}")
        lib.hal_sim_seed(ctypes.c_uint64(int(seed)))

    def wrong_device(self, device: torch.device) -> str:
        return ""

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, shared: int, parameters: bytes) -> None:
        error = self._launch(kernel.encode(), *grid, threads, shared, parameters, len(parameters))
        if error:
            raise hal.HalError(f"CUDA simulator, kernel {kernel}: {error.decode()}")
