"""The opencl backend: any OpenCL 1.2 device, on tensors in host memory.

torch has no OpenCL device, so `device()` returns torch's CPU device; memory.py gives kernels access to its tensors.
Probing only queries the drivers and opens no device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import hal

from . import memory as buffers
from .engine import Engine, devices, set_engine, unfit

MEMORY = ("auto", "zero_copy", "staging")


class OpenCL(hal.Backend):
    """One OpenCL device.

    device_number: index into the devices that `hal info` lists; default by LOCAL_RANK, which distributes the processes
        of a machine over its devices.
    memory: "zero_copy" (kernels access host memory), "staging" (copies through a pool), or "auto": zero_copy if the
        device shares memory with the host.
    lanes, group: the shape of kernels (see kernels/common.h); default: what the device prefers.
    profile: measure the time of every kernel, see `kernel_times`.

    Raises HalError for an unknown memory mode.
    """

    name = "opencl"
    api = 2

    def __init__(
        self,
        *,
        device_number: int | None = None,
        memory: str = "auto",
        lanes: int | None = None,
        group: int | None = None,
        profile: bool = False,
    ) -> None:
        if memory not in MEMORY:
            raise hal.HalError(f"unknown memory mode {memory!r}; choose one of {', '.join(MEMORY)}")
        self.device_number, self.memory, self.lanes, self.group = device_number, memory, lanes, group
        self.profile = profile
        self._engine: Engine | None = None
        self._memory: buffers.Memory | None = None

    def probe(self) -> hal.Probe:
        try:
            return self._probed(devices())
        except hal.BackendUnavailable as error:
            return hal.Probe(False, 0, str(error))
        except Exception as error:  # a probe must never raise, even with a broken driver
            return hal.Probe(False, 0, f"looking for an OpenCL device failed: {type(error).__name__}: {error}")

    def _probed(self, available: Sequence[Any]) -> hal.Probe:
        """The result of a probe that found these devices. Raises what the drivers raise."""
        facts = {f"device {i}": f"{d.name.strip()}, {d.version.strip()}" for i, d in enumerate(available)}
        if not available:
            return hal.Probe(False, 0, "the OpenCL drivers report no device")
        number = self._number(len(available))
        if not 0 <= number < len(available):
            reason = f"device_number={number}, but the OpenCL drivers report {len(available)} device(s)"
            return hal.Probe(False, 0, reason, facts)
        chosen = available[number]
        if unfit(chosen):
            return hal.Probe(False, 0, f"{chosen.name.strip()}: {unfit(chosen)}", facts)
        facts["shares memory with the host"] = "yes" if chosen.host_unified_memory else "no"
        return hal.Probe(True, 1, f"{chosen.name.strip()} ({chosen.platform.name.strip()})", facts)

    def _number(self, count: int) -> int:
        if self.device_number is not None:
            return self.device_number
        return int(os.environ.get("LOCAL_RANK", "0")) % count

    def build(self) -> None:
        available = devices()
        device = available[self._number(len(available))]
        engine = Engine(device, lanes=self.lanes, group=self.group, profile=self.profile)
        shared = bool(device.host_unified_memory) if self.memory == "auto" else self.memory == "zero_copy"
        self._engine, self._memory = engine, buffers.Memory(engine, shared)
        set_engine(engine)
        buffers.set_memory(self._memory)

    def device(self, index: int = 0) -> torch.device:
        if index != 0:
            raise hal.HalError(
                f"the opencl backend works on one device (index 0); index {index} was asked for. "
                f"Choose the OpenCL device with the option device_number."
            )
        return torch.device("cpu")

    def capabilities(self) -> hal.Capabilities:
        """Tensors are in host memory; a call returns when its results are there."""
        return hal.Capabilities(host_visible=True)

    def synchronize(self) -> None:
        if self._engine is not None:
            self._engine.finish()

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> hal.Comm:
        return hal.torch_comm(hal.GLOO, ranks, timeout=timeout)

    def memory_stats(self) -> Mapping[str, int]:
        """Bytes of OpenCL buffers: "allocated" now (0 between calls), "peak" of any call, "reserved" by the pool."""
        return {} if self._memory is None else self._memory.stats()

    def reset_peak_memory(self) -> None:
        if self._memory is not None:
            self._memory.peak = self._memory.allocated

    def kernel_times(self) -> Mapping[str, tuple[int, float]]:
        """Kernel name -> (runs, seconds on the device), from OpenCL's profiling events; empty without profile=True."""
        if self._engine is None:
            return {}
        return {name: (count, self._engine.seconds[name]) for name, count in self._engine.calls.items()}
