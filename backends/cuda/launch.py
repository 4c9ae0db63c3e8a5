"""Launching of kernels: the parameters are packed into one buffer, and an engine runs the kernel.

There are two engines: `Device` (cubins compiled by compile.py, launched through CuPy's driver bindings on torch's
current stream, and therefore capturable in a CUDA graph) and `Simulator` (simulator/build.py). `hal.use` selects one;
before that, nothing is imported, compiled or initialised. Parameters are tensors and None (addresses), integers,
floats, `Struct`, and bytes (structs without addresses), each packed in a multiple of 8 bytes, as kernels/common.h
requires. A kernel's parameters are of the same kinds at every launch, so its packing is made once (`Packing`). An
address always comes from a tensor, because the simulator lets a kernel access its launch's tensors only.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import hal
from hal import address

MAX_THREADS = 256
"""The maximum number of threads per block, for which every kernel is compiled (`__launch_bounds__`)."""
PARAMETERS = 4096
"""The bytes of parameters that a kernel may have."""


class Engine(Protocol):
    """Runs kernels. device_type: type of device of the tensors; multiprocessors: the number by which grids scale;
    max_blocks: the limit of a dimension of the grid; shared_memory: the bytes of it that a block may have."""

    device_type: str
    multiprocessors: int
    max_blocks: int
    shared_memory: int

    def launch(
        self, kernel: str, grid: tuple[int, int], threads: int, shared: int, parameters: Sequence[Any]
    ) -> None: ...

    def capturing(self) -> bool: ...


_engine: Engine | None = None
deterministic = False
"""Whether torch's attention kernels must return bit-equal gradients from run to run."""


def set_engine(engine: Engine) -> None:
    """Called by the backend's build()."""
    global _engine
    _engine = engine


def device_type() -> str:
    """The type of device of tensors: "cpu" on the simulator, otherwise "cuda", also before an engine is set."""
    return "cuda" if _engine is None else _engine.device_type


def simulated() -> bool:
    """Whether kernels run on the simulator."""
    return _engine is not None and _engine.device_type == "cpu"


def load(device: int) -> None:
    """Loads the kernels on a device, if they run on devices."""
    if isinstance(_engine, Device):
        _engine.load(device)


def capturing() -> bool:
    """Whether a graph is being captured, during which the host cannot wait for the device."""
    return _require().capturing()


def multiprocessors() -> int:
    """The number of multiprocessors of the device, by which grids are scaled."""
    return _require().multiprocessors


def _require() -> Engine:
    if _engine is None:
        raise hal.HalError("the cuda backend has not been built; call hal.use('cuda') before running its kernels")
    return _engine


def blocks(pieces: int, *limits: int) -> int:
    """The number of blocks (1 or more) of a kernel that iterates over `pieces` of work: at most each of `limits`."""
    return max(1, min(pieces, *limits, _require().max_blocks))


def shared_memory() -> int:
    """The bytes of dynamic shared memory that a block may request; before an engine is set, those of a GPU."""
    return Device.shared_memory if _engine is None else _engine.shared_memory


class Struct:
    """A struct parameter that contains addresses; tensors among `values` are packed as such, None as 0."""

    def __init__(self, format: str, *values: Any) -> None:
        self.tensors = [v for v in values if isinstance(v, Tensor)]
        self.data = struct.pack(format, *map(_number, values))


def _number(value: Any) -> Any:
    if value is None or isinstance(value, Tensor):
        return address(value)
    return value


class Packing:
    """The parameter buffers of launches. The first launch of a kernel decides the kinds of its parameters."""

    def __init__(self) -> None:
        self._by_kernel: dict[str, Callable[..., bytes]] = {}

    def __call__(self, kernel: str, values: Sequence[Any]) -> bytes:
        pack = self._by_kernel.get(kernel)
        if pack is None:
            pack = self._by_kernel[kernel] = _packing(values)
        return pack(*values)


def _packing(values: Sequence[Any]) -> Callable[..., bytes]:
    """A function that packs parameters of the kinds of `values`: one call of struct.pack, whose arguments it names."""
    names = [f"v{i}" for i in range(len(values))]
    formats, terms = [], []
    for name, value in zip(names, values):
        if isinstance(value, Struct):
            formats.append(f"{len(value.data)}s")
            terms.append(f"{name}.data")
        elif isinstance(value, bytes):
            formats.append(f"{len(value)}s")
            terms.append(name)
        elif value is None or isinstance(value, Tensor):
            formats.append("q")
            terms.append(f"address({name})")
        else:
            formats.append("d" if isinstance(value, float) else "q")
            terms.append(name)
    scope = {"pack": struct.Struct("=" + "".join(formats)).pack, "address": address}
    function: Callable[..., bytes] = eval(f"lambda {', '.join(names)}: pack({', '.join(terms)})", scope)
    return function


def tensors_of(values: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among the parameters of a launch, with its place: "parameter 1", or "parameter 2[5]" in a struct."""
    for i, value in enumerate(values, 1):
        if isinstance(value, Tensor):
            yield f"parameter {i}", value
        elif isinstance(value, Struct):
            yield from ((f"parameter {i}[{k}]", x) for k, x in enumerate(value.tensors))


def run(kernel: str, grid: tuple[int, int], threads: int, *parameters: Any, shared: int = 0) -> None:
    """Queues `kernel` (its name as in its file's EXPORT list) on the current stream."""
    _require().launch(kernel, grid, threads, shared, parameters)


def _primary_context(device: int) -> int:
    """The context of torch and of CUDA's runtime on a device. Retained, so that it stays until the process ends."""
    driver, handle, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    error = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), device)
    error = error or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    if error or context.value is None:
        raise hal.HalError(f"CUDA's driver gives no context on cuda:{device} (error {error}); see nvidia-smi")
    return context.value


class _Parameters(threading.local):
    """The buffer from which the driver copies a launch's parameters, of each thread."""

    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(PARAMETERS)
        self.size = ctypes.c_size_t()
        # CU_LAUNCH_PARAM_BUFFER_POINTER (1), CU_LAUNCH_PARAM_BUFFER_SIZE (2), CU_LAUNCH_PARAM_END (0).
        self._extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.data), 2, ctypes.addressof(self.size), 0)
        self.extra = ctypes.addressof(self._extra)


class Device:
    """Kernels on the GPUs of this process, launched on the device of their tensors."""

    device_type = "cuda"
    max_blocks = 1 << 30  # of a grid's first dimension; callers limit the second one
    shared_memory = 48 * 1024  # every GPU allows this without opting in; an instance has that of its devices

    def __init__(self, cubins: Mapping[str, Mapping[str, Any]]) -> None:
        """cubins: architecture ("sm_90") -> kernel name -> (cubin, mangled name); see compile.cubins."""
        from cupy.cuda import driver

        self._driver, self._cubins = driver, cubins
        self._functions: dict[tuple[int, str], int] = {}
        self._contexts: dict[int, int] = {}
        self._loading = threading.Lock()
        self._pack, self._parameters = Packing(), _Parameters()
        self._stream = torch._C._cuda_getCurrentRawStream
        self._current = torch.cuda.current_device
        self._multiple_devices = torch.cuda.device_count() > 1
        self._opted_in: dict[int, int] = {}
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.multiprocessors = properties.multi_processor_count
        # Half of a multiprocessor's, without what the driver and static arrays take, so that it runs two such blocks:
        # 112 KB on sm_90.
        half = properties.shared_memory_per_multiprocessor // 2 - 2048
        self.shared_memory = max(self.shared_memory, half)

    def load(self, device: int) -> None:
        """Loads all kernels on a device. Not possible while a graph is captured, so it is done before the first call
        on the devices that this process is known to use."""
        restore = self._bind(device)
        try:
            self._load(device)
        finally:
            if restore is not None:
                self._driver.ctxSetCurrent(restore)

    def _load(self, device: int) -> None:
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        if architecture not in self._cubins:
            raise hal.HalError(f"cuda:{device} is an {architecture}; HAL's kernels need sm_80 or later")
        if torch.cuda.is_current_stream_capturing():
            raise hal.HalError(
                f"HAL's kernels are not loaded on cuda:{device}, and cannot be while a graph is captured; run one of "
                "HAL's ops there before the capture"
            )
        modules: dict[int, int] = {}
        functions: dict[tuple[int, str], int] = {}
        with self._loading:
            for kernel, (cubin, name) in self._cubins[architecture].items():
                if (device, kernel) in self._functions:  # another thread has loaded them
                    return
                if id(cubin) not in modules:
                    modules[id(cubin)] = self._driver.moduleLoadData(cubin)
                functions[device, kernel] = self._driver.moduleGetFunction(modules[id(cubin)], name)
            self._functions.update(functions)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _bind(self, device: int) -> int | None:
        """Makes the device's context current in this thread; returns the one to restore afterwards, None for none.

        The driver's functions need it, unlike those of the runtime. A new thread has none, and torch makes none for
        device 0 (autograd's threads). Another context is restored, because it determines torch's current device.
        """
        context = self._contexts.get(device)
        if context is None:
            context = self._contexts[device] = _primary_context(device)
        before: int = self._driver.ctxGetCurrent()
        if before == context:
            return None
        restore = before if before or device != self._current() else None
        self._driver.ctxSetCurrent(context)
        return restore

    def _device_of(self, parameters: Sequence[Any]) -> int:
        """The device of the launch's tensors, which are all on one."""
        if self._multiple_devices:
            for _, tensor in tensors_of(parameters):
                if tensor.device.index is not None:
                    return int(tensor.device.index)
        return self._current()

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, shared: int, parameters: Sequence[Any]) -> None:
        device, packed, to = self._device_of(parameters), self._pack(kernel, parameters), self._parameters
        if len(packed) > PARAMETERS:
            raise hal.HalError(f"{kernel} has {len(packed)} bytes of parameters; a kernel may have {PARAMETERS}")
        ctypes.memmove(to.data, packed, len(packed))
        to.size.value = len(packed)
        restore = self._bind(device)
        try:
            function = self._functions.get((device, kernel))
            if function is None:
                self._load(device)
                function = self._functions[device, kernel]
            if shared > Device.shared_memory and shared > self._opted_in.get(function, 0):
                # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._driver.funcSetAttribute(function, 8, shared)
                self._opted_in[function] = shared
            stream = self._stream(device)
            self._driver.launchKernel(function, *grid, 1, threads, 1, 1, shared, stream, 0, to.extra)
        finally:
            if restore is not None:
                self._driver.ctxSetCurrent(restore)
