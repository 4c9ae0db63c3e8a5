"""The cuda backend: NVIDIA GPUs, with torch's own attention and products and kernels compiled by NVRTC.

Importing and probing touch no driver state: devices are counted by torch through NVML, and everything else is done in
build(). With simulate=True (or HAL_SIMULATE=1) the kernels run on the CPU, see docs/cuda-simulator.md.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import hal
from hal.backend_tools import recorded

from . import compile, launch
from .comm import NCCL, NcclComm
from .device_specs import DEVICE_SPECS
from .order import class_of, orders, source_for
from .simulator import graph
from .simulator.build import GRID, SHARED, Simulator, find_compiler, library

OLDEST = (8, 0)
"""The lowest compute capability with the instructions that the kernels use (bfloat16)."""

STAND_IN = "stand-in: a reference on the CPU in place of torch's CUDA kernel"

WHEEL = "stand-in: a reference on the CPU in place of the wheel that torch calls"

SYMMETRIC_MEMORY = "stand-in: torch's op computed on the CPU over gloo, without overlap"


class Cuda(hal.Backend):
    """NVIDIA GPUs of compute capability 8.0 and later; with simulate=True the kernels run on the CPU."""

    name = "cuda"
    device_specs = DEVICE_SPECS

    def __init__(
        self,
        simulate: bool | None = None,
        deterministic: bool = False,
        grid: int | None = None,
        shared: int | None = None,
    ) -> None:
        """deterministic: torch's attention kernels sum gradients in a fixed order, which is slower.

        grid, shared: the simulated device's limits: blocks in each dimension of a kernel that iterates (default 3), and
        bytes of dynamic shared memory per block (default 1024). Raises HalError if they are given without simulate, or
        cannot be.
        """
        if simulate is None:
            simulate = os.environ.get("HAL_SIMULATE", "") not in ("", "0")
        if not simulate and (grid is not None or shared is not None):
            raise hal.HalError("grid and shared are limits of the simulated device; they need simulate=True")
        if (grid is not None and grid < 1) or (shared is not None and not 0 <= shared <= 48 * 1024):
            raise hal.HalError(f"grid must be 1 or more and shared 0 to 49152 bytes, got {grid} and {shared}")
        self.simulate = self.simulated = simulate
        self.grid, self.shared = grid, shared
        self.deterministic = deterministic
        self.set_attention_order("this device", "")
        if simulate:
            torch_kernels = ("cuda/flash", "cuda/cudnn", "cuda/sdpa", "cuda/flex", "cuda/torch", "cuda/cublaslt")
            self.stand_ins = {**dict.fromkeys(torch_kernels, STAND_IN), "cuda/symm_mem": SYMMETRIC_MEMORY}
            self.stand_ins |= dict.fromkeys(("cuda/fa3", "cuda/fa4"), WHEEL)

    def probe(self) -> hal.Probe:
        try:
            return self._probe_simulator() if self.simulated else _probe_device()
        except Exception as error:  # a probe must never raise, even with a broken installation
            return hal.Probe(False, 0, f"looking for a GPU failed: {type(error).__name__}: {error}")

    def _probe_simulator(self) -> hal.Probe:
        try:
            compiler = find_compiler()[0]
        except hal.BackendUnavailable as error:
            return hal.Probe(False, 0, str(error))
        facts = {"compiler": compiler, "torch's own kernels": "stood in for by references on the CPU"}
        return hal.Probe(True, 1, "simulated: the CUDA kernels run on the CPU", facts)

    def build(self) -> None:
        launch.deterministic = self.deterministic
        if self.simulated:
            limits = (GRID if self.grid is None else self.grid, SHARED if self.shared is None else self.shared)
            self._simulator = Simulator(library(), *limits)
            launch.set_engine(self._simulator)
            return
        try:
            torch.cuda.init()
        except RuntimeError as error:  # for example a driver older than torch's CUDA
            raise hal.BackendUnavailable(f"torch cannot start CUDA: {error}") from error
        capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        _require_kernels_for(torch.cuda.get_device_capability())
        # Devices that are too old are skipped, because they may be present as long as they are not used.
        architectures = ["sm_{}{}".format(*c) for c in sorted(capabilities) if c >= OLDEST]
        launch.set_engine(launch.Device({a: compile.cubins(a) for a in architectures}))
        launch.load(torch.cuda.current_device())
        name = torch.cuda.get_device_name()
        self.set_attention_order(name, "sm_{}{}".format(*torch.cuda.get_device_capability()))

    def set_attention_order(self, device_name: str, architecture: str) -> None:
        """Prefers implementations of attention as on a device of this name and architecture ("sm_90")."""
        self._orders = orders(device_name, architecture)
        self.order_sources = {"flash_attention": source_for(device_name, architecture)}

    def preference(self, op: hal.Op[Any, Any]) -> Callable[[hal.Call], tuple[str, ...]] | None:
        by_class = self._orders
        return (lambda call: by_class[class_of(call)]) if op.name == "flash_attention" else None

    def device(self, index: int = 0) -> torch.device:
        if self.simulated:
            if index != 0:
                raise hal.HalError(f"the simulated cuda backend has one device (index 0); device {index} was asked for")
            return torch.device("cpu")
        return torch.device("cuda", index)

    def capabilities(self) -> hal.Capabilities:
        dtypes = {torch.float64, torch.int8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2}
        return hal.Capabilities(
            dtypes=hal.Capabilities().dtypes | dtypes,
            asynchronous=not self.simulated,
            host_visible=bool(self.simulated),
            deterministic=bool(self.simulated) or self.deterministic,
            graphs=True,
            memory_pools=not self.simulated,
        )

    def synchronize(self) -> None:
        if not self.simulated:
            torch.cuda.synchronize()

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> hal.Comm:
        if self.simulated:
            return hal.torch_comm(hal.GLOO, ranks, timeout=timeout)
        local = torch.device("cuda", self.local_index())
        torch.cuda.set_device(local)  # NCCL uses the current device, which would otherwise be device 0 in every process
        launch.load(local.index)
        return hal.torch_comm(NCCL, ranks, timeout=timeout, device=local, kind=NcclComm)

    def memory_stats(self) -> Mapping[str, int]:
        """Bytes on the current device: "allocated", "peak" and "reserved" by torch's allocator, "free" and "total"."""
        if self.simulated:
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "free": free,
            "total": total,
        }

    def reset_peak_memory(self) -> None:
        if not self.simulated:
            torch.cuda.reset_peak_memory_stats()

    @contextlib.contextmanager
    def stream(self) -> Iterator[object]:
        """Work inside runs on a separate stream, after the work submitted before; later work waits for it."""
        if self.simulated:
            yield None
            return
        outer, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(outer)
        try:
            with torch.cuda.stream(side):
                yield side
        finally:
            outer.wait_stream(side)

    def event(self) -> torch.cuda.Event | None:
        """An event with a time, recorded on the current stream; None on the simulator, which has no streams."""
        if self.simulated:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, event: object) -> None:
        if isinstance(event, torch.cuda.Event):
            event.wait()

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        if self.simulated:
            return graph.recorded(self._simulator, function)
        return recorded(self, function, torch.cuda.CUDAGraph(), torch.cuda.graph)

    @contextlib.contextmanager
    def memory_pool(self) -> Iterator[object]:
        if self.simulated:
            with super().memory_pool() as pool:
                yield pool
            return
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            yield pool

    @contextlib.contextmanager
    def profile_range(self, name: str) -> Iterator[None]:
        """An NVTX range (for Nsight) that is also a range of torch's profiler."""
        if not self.simulated:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            if not self.simulated:
                torch.cuda.nvtx.range_pop()


def _probe_device() -> hal.Probe:
    simulate = "simulate=True (--simulate) runs the kernels on the CPU"
    facts = {"torch": torch.__version__}
    if torch.version.cuda is None:
        return hal.Probe(
            False,
            0,
            f"this torch ({torch.__version__}) is built without CUDA; install one built with it, or {simulate}",
            facts,
        )
    facts["torch's CUDA"] = torch.version.cuda
    if not _has_driver():
        return hal.Probe(False, 0, f"no NVIDIA driver (libcuda) here; install it, or {simulate}", facts)
    count = torch.cuda.device_count()
    if count == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        return hal.Probe(False, 0, f"the NVIDIA driver shows no device{hint}; see nvidia-smi, or {simulate}", facts)
    if compile.missing():
        return hal.Probe(False, 0, compile.missing(), facts)
    facts["attention order"] = source_for("this device", "")
    return hal.Probe(True, count, f"{count} NVIDIA device{'s' if count > 1 else ''}", facts)


def _require_kernels_for(capability: tuple[int, int]) -> None:
    """Raises BackendUnavailable if no kernels can be compiled for the current device."""
    name, (major, minor) = torch.cuda.get_device_name(), capability
    if capability < OLDEST:
        raise hal.BackendUnavailable(
            f"{name} has compute capability {major}.{minor}; HAL's kernels need {OLDEST[0]}.{OLDEST[1]} or later. "
            "CUDA_VISIBLE_DEVICES chooses another device"
        )
    known = compile.nvrtc().getSupportedArchs()
    if major * 10 + minor not in known:
        raise hal.BackendUnavailable(
            f"{name} is an sm_{major}{minor}, which this NVRTC ({'.'.join(map(str, compile.nvrtc().getVersion()))}, "
            f"up to sm_{max(known)}) does not support; pip install --upgrade nvidia-cuda-nvrtc"
        )


def _has_driver() -> bool:
    return ctypes.util.find_library("cuda") is not None or os.path.exists("/dev/nvidiactl")
