"""One OpenCL device: its context, its in-order queue, its programs, and counts and times of kernels.

Programs are built on first use, once per file and set of -D options; PyOpenCL and the driver cache the binaries. Errors
of OpenCL are converted to HAL's: a missing device or driver is BackendUnavailable, later errors are a HalError that
names the kernel and the remedy.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import hal

KERNELS = Path(__file__).resolve().parent / "kernels"

TYPE = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Element types of the kernels."""

CHUNK, SPAN = 4096, 512
"""Columns per group in kernels without a sum over the row, and in kernels with sums over rows."""


class OutOfDeviceMemory(hal.HalError, MemoryError):
    """The OpenCL device (or the host on its behalf) has no memory left for a buffer."""


def opencl() -> Any:
    """The pyopencl module. Raises BackendUnavailable if it cannot be imported."""
    try:
        import pyopencl
    except Exception as error:  # a broken ICD loader can raise any exception
        raise hal.BackendUnavailable(
            f"pyopencl cannot be imported ({type(error).__name__}: {error}); install it with: pip install pyopencl"
        ) from error
    return pyopencl


def devices() -> list[Any]:
    """Every OpenCL device of every platform. Raises BackendUnavailable if there is no driver (ICD) at all."""
    cl = opencl()
    try:
        return [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error as error:
        raise hal.BackendUnavailable(
            f"no OpenCL driver (ICD) is available ({error}); install your device's, or pocl-opencl-icd for the CPU"
        ) from error


def unfit(device: Any) -> str:
    """Why this device cannot run the kernels, which need a compiler, OpenCL C 1.2 and 64-bit integers; "" if it can."""
    if not device.available or not device.compiler_available:
        return "the driver reports that the device or its compiler is not available"
    if device.profile != "FULL_PROFILE":
        return f"{device.profile}; the kernels need the full profile (64-bit integers)"
    numbers = [int(n) for n in device.version.split()[1].split(".")]
    return "" if numbers >= [1, 2] else f"{device.version.strip()}; the kernels need OpenCL 1.2"


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Converts OpenCL's errors to HAL's; `what` describes the operation."""
    cl = opencl()
    try:
        yield
    except cl.Error as error:
        if isinstance(error, cl.MemoryError) or error.code == cl.status_code.INVALID_BUFFER_SIZE:
            raise OutOfDeviceMemory(f"{what}: OpenCL is out of memory ({error}); use a smaller micro batch") from error
        raise hal.HalError(
            f"{what}: OpenCL reports {error}. If it happens again, start the process anew: the device's context may be "
            f"lost; `hal doctor --backend opencl` shows whether the device works."
        ) from error


@cache
def _source(file: str) -> str:
    return (KERNELS / "common.h").read_text() + f'#line 1 "{file}.cl"\n' + (KERNELS / f"{file}.cl").read_text()


class Engine:
    """A device in use. lanes: floats in a kernel's vectors. group: work-items that share a row."""

    def __init__(
        self, device: Any, *, lanes: int | None = None, group: int | None = None, profile: bool = False
    ) -> None:
        """lanes, group: by default those that the device prefers (a wide vector and 1, or 1 and up to 64). profile:
        measure the time of kernels."""
        cl = opencl()
        self.cl, self.device, self.profile = cl, device, profile
        # Devices that prefer vectors (CPUs) get a row per work-item, others a group of work-items per row.
        wide = device.preferred_vector_width_float
        self.lanes = lanes or (16 if wide >= 16 else 8 if wide >= 8 else 4 if wide >= 4 else 1)
        self.group = group or (1 if self.lanes > 1 else min(64, device.max_work_group_size))
        if self.lanes not in (1, 4, 8, 16) or self.group < 1 or self.group & (self.group - 1):
            raise hal.HalError(f"lanes must be 1, 4, 8 or 16 and group a power of 2; got {self.lanes} and {self.group}")
        with translated(f"opening {device.name}"):
            self.context = cl.Context([device])
            how = cl.command_queue_properties.PROFILING_ENABLE if profile else 0
            self.queue = cl.CommandQueue(self.context, device, properties=how)
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.RLock()
        self._pending: list[tuple[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def options(self, defines: Mapping[str, Any]) -> list[str]:
        """Compiler options of a program: the device's shape and the element types."""
        fixed = {"LANES": self.lanes, "GROUP": self.group, "CHUNK": CHUNK, "SPAN": SPAN}
        values = {**fixed, **{n: TYPE[v] if isinstance(v, torch.dtype) else v for n, v in defines.items()}}
        return ["-cl-std=CL1.2", *(f"-D{name}={value}" for name, value in values.items())]

    def program(self, file: str, defines: Mapping[str, Any]) -> Any:
        """kernels/`file`.cl, built for this device with these -D options. Raises HalError with the compiler's log."""
        key = (file, *defines.items())
        with self._lock:
            if key not in self._programs:
                options = self.options(defines)
                try:
                    self._programs[key] = self.cl.Program(self.context, _source(file)).build(options)
                except self.cl.Error as error:
                    raise hal.HalError(
                        f"{self.device.name} does not build {file}.cl with {' '.join(options)}: {error}"
                    ) from error
            return self._programs[key]

    def enqueue(
        self,
        file: str,
        name: str,
        defines: Mapping[str, Any],
        grid: Sequence[int],
        arguments: Sequence[Any],
    ) -> None:
        """Queues kernel `name` with grid[0] x grid[1] x ... groups of `group` x 1 x ... work-items."""
        key = (file, name, *defines.items())
        with self._lock:  # a kernel object holds its arguments, and threads share it
            kernel = self._kernels.get(key)
            if kernel is None:
                kernel = self._kernels[key] = self.cl.Kernel(self.program(file, defines), name)
            with translated(f"running {name} ({file}.cl)"):
                kernel.set_args(*arguments)
                size = (grid[0] * self.group, *grid[1:])
                event = self.cl.enqueue_nd_range_kernel(self.queue, kernel, size, (self.group, *[1] * (len(grid) - 1)))
            if self.profile:
                self._pending.append((name, event))

    def finish(self) -> None:
        """Waits for everything queued, and counts the time of kernels if the queue is profiled."""
        with translated("waiting for the device"):
            self.queue.finish()
        with self._lock:
            done, self._pending = self._pending, []
            for name, event in done:
                event.wait()  # another thread may have queued it after the queue was emptied
                self.calls[name] += 1
                self.seconds[name] += (event.profile.end - event.profile.start) * 1e-9


_engine: Engine | None = None


def set_engine(engine: Engine) -> None:
    """Called by the backend's build()."""
    global _engine
    _engine = engine


def engine() -> Engine:
    """The device in use. Raises HalError before `hal.use('opencl')`."""
    if _engine is None:
        raise hal.HalError("the opencl backend has not been built; call hal.use('opencl') before running its kernels")
    return _engine
