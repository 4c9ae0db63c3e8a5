"""Compiles the kernels and cuda_host.h with g++ into one library, cached, and runs kernels from it.

HAL_CUDA_SEED determines the order of threads. Tests inject faults by compiling modified copies of the kernels' folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

import hal
from hal import backend_tools

from ..launch import Packing, tensors_of

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "kernels"
_FLAGS = ["-std=c++17", "-fPIC", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
# Without -fvisibility=hidden, libraries of different sources in one process would share the variables of templates.
_FLAGS += ["-fno-math-errno", "-DHAL_SIMULATE", "-fvisibility=hidden"]

# The kernels call runtime.cpp before each access to memory and when one of these checks fails. Sanitizers' own runtimes
# are not linked: they would have to be loaded before Python, and they end the process. Vectorised accesses are not
# instrumented by every compiler.
_INSTRUMENTED = ["-fsanitize=thread,alignment,bounds,signed-integer-overflow", "-fno-tree-vectorize"]
_INSTRUMENTED += ["-fno-tree-slp-vectorize"]


GRID, SHARED = 3, 1024
"""The limits of a simulated device unless others are chosen. With three blocks, the fewest possible, one is neither the
first nor the last; 1 KB holds the sums of a layer norm of 128 columns."""


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
    compiler = find_compiler()
    flags = [*_FLAGS, *contraction(), "-O1"]  # -O2 and -g take 1.6 times as long; most runs are short
    sources = [HERE / "runtime.cpp", *sorted(kernels.glob("*.cu"))]
    version = backend_tools.compiler_version(compiler)
    headers = [p.read_bytes() for p in [*sorted(kernels.glob("*.h")), HERE / "cuda_host.h"]]
    common = hashlib.sha256(
        b"\0".join([repr((compiler, version, flags, _INSTRUMENTED)).encode(), *headers])
    ).hexdigest()
    cache = backend_tools.cache_directory("cuda")
    objects = {s: cache / f"simulator-{s.stem}-{_digest(common.encode(), s.read_bytes())}.o" for s in sources}
    target = cache / f"simulator-{_digest(*(o.name.encode() for o in objects.values()))}.so"
    if not backend_tools.intact(target):
        with backend_tools.locked(cache / "simulator.lock"):
            if not backend_tools.intact(target):
                include = [f"-I{HERE}", f"-I{kernels}"]
                _build([*compiler, *flags, *include], {s: o for s, o in objects.items() if not backend_tools.intact(o)})
                part = target.with_suffix(".part")
                _run([*compiler, *flags, "-shared", *map(str, objects.values()), "-o", str(part)])
                backend_tools.place(part, target)
    return target


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _build(compile: list[str], objects: dict[Path, Path]) -> None:
    """Compiles every source to its object; an object under its final name is complete."""
    if len(objects) > 1:
        backend_tools.announce(f"compiling the CUDA kernels for the CPU ({len(objects)} files) ...")

    def compile_one(source: Path) -> None:
        part = objects[source].with_suffix(".part")
        checks = _INSTRUMENTED if source.suffix == ".cu" else []
        _run([*compile, *checks, "-x", "c++", "-c", str(source), "-o", str(part)])
        backend_tools.place(part, objects[source])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sorted(objects, key=lambda source: -source.stat().st_size)))


def _run(command: list[str]) -> None:
    backend_tools.run_compiler(command, "the CUDA kernels")


class _Fault(ctypes.Structure):
    """struct Fault of cuda_host.h."""

    _fields_ = (("at", ctypes.c_uint64), ("size", ctypes.c_uint64), ("code", ctypes.c_uint64))


class Simulator:
    """The engine that runs kernels on the CPU. Tensors are CPU tensors, and a launch returns when it is done.

    grid: the maximum number of blocks, in each dimension, of a kernel that iterates. shared: the bytes of dynamic
    shared memory that a block may have. Both are small, so that kernels iterate, and use global memory for what does
    not fit, at the sizes of tests. last_blocks: run only so many blocks at the end of each grid (0: all), to reach
    offsets that 32 bits cannot hold without computing what is before them.
    """

    device_type = "cpu"
    multiprocessors = 2  # grids are small because blocks take time; two are enough to test the distribution of rows

    def __init__(self, path: Path, grid: int = GRID, shared: int = SHARED, last_blocks: int = 0) -> None:
        self.max_blocks, self.shared_memory, self._last_blocks = grid, shared, last_blocks
        self._path, lib, self._pack = path, ctypes.CDLL(str(path)), Packing()
        self._recording: tuple[list[Callable[[], object]], Callable[[Iterable[Tensor]], None]] | None = None
        self._launch = lib.hal_sim_launch
        u32, u64 = ctypes.c_uint32, ctypes.c_uint64
        self._launch.argtypes = [ctypes.c_char_p, u32, u32, u32, u32, ctypes.c_char_p, u64]
        self._launch.argtypes += [ctypes.POINTER(u64), u64, u64, ctypes.POINTER(_Fault)]
        self._launch.restype = ctypes.c_char_p
        seed = os.environ.get("HAL_CUDA_SEED", "1")
        if not seed.isdigit():
            raise hal.HalError(f"HAL_CUDA_SEED must be a whole number, got {seed!r}")
        lib.hal_sim_seed(u64(int(seed)))

    @contextlib.contextmanager
    def recording(self, steps: list[Callable[[], object]], keep: Callable[[Iterable[Tensor]], None]) -> Iterator[None]:
        """A context in which launches are also appended to `steps`; `keep` gets the tensors of each before it runs."""
        self._recording = steps, keep
        try:
            yield
        finally:
            self._recording = None

    def capturing(self) -> bool:
        return self._recording is not None

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, shared: int, parameters: Sequence[Any]) -> None:
        if self._recording is not None:
            steps, keep = self._recording
            keep(x for _, x in tensors_of(parameters))
            steps.append(lambda: self.launch(kernel, grid, threads, shared, parameters))
        if shared > self.shared_memory:
            raise hal.HalError(
                f"CUDA simulator, kernel {kernel}: {shared} bytes of shared memory were requested, a block has "
                f"{self.shared_memory} (launch.shared_memory())"
            )
        tensors = list(tensors_of(parameters))
        bounds = [address for _, x in tensors for address in _extent(x)]
        packed, fault = self._pack(kernel, parameters), _Fault()
        memory = (ctypes.c_uint64 * len(bounds))(*bounds)
        args = (
            kernel.encode(),
            *grid,
            threads,
            shared,
            packed,
            len(packed),
            memory,
            len(tensors),
            self._last_blocks,
            fault,
        )
        error = self._launch(*args).decode()
        if fault.size:
            error += f", {_nearest(fault, tensors)}"
        if fault.code:
            error += f"{self._line(fault.code)}. Its tensors: {_listed(tensors)}"
        if error:
            raise hal.HalError(f"CUDA simulator, kernel {kernel}: {error}")

    def _line(self, code: int) -> str:
        """The line of the kernel's file that contains the instruction before `code`, if binutils can determine it."""
        tool = shutil.which("addr2line")
        if tool is None:
            return ""
        command = [tool, "-i", "-s", "-e", str(self._path), hex(code - 1)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        # Innermost first: functions of common.h, then the kernel that they are inlined into, then the simulator.
        places = [line.split(" ")[0] for line in done.stdout.splitlines()]
        known = [place for place in places if not place.startswith(("?", "cuda_host.h"))]
        inside = next((i for i, place in enumerate(known) if ".cu:" in place), 0)
        return f", in {' from '.join(known[: inside + 1])}" if known else ""


def _extent(x: Tensor) -> tuple[int, int]:
    """The address of x's first element and the one past its last."""
    begin = x.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) if x.numel() else -1
    return begin, begin + (last + 1) * x.element_size()


def _nearest(fault: _Fault, tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Where the access is relative to the tensor that it is closest to."""
    distances = []
    for name, x in tensors:
        begin, end = _extent(x)
        if fault.at < begin:
            distances.append((begin - fault.at, f"{begin - fault.at} bytes before {name}"))
        else:
            distances.append((abs(fault.at - end), f"{max(fault.at - end, 0)} bytes after the end of {name}"))
    return min(distances)[1] if distances else "and the kernel has no tensors"


def _listed(tensors: Sequence[tuple[str, Tensor]]) -> str:
    return ", ".join(f"{name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in tensors)
