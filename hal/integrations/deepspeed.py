"""DeepSpeed on a HAL backend: an accelerator class made from the active backend, a third party's included.

    hal.use("cpu_ref")
    hal.integrations.deepspeed.use()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

DeepSpeed's queries about the device are served by the backend (device, synchronisation, memory, ranges in profiles,
dtypes) or by torch's module of the device's type (streams, events, random state). DeepSpeed compiles its own kernels
only for devices that it supports, so there are none here: functions that need one raise DeepSpeed's error. Collectives
are torch.distributed's.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

import hal


class HalAccelerator(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed has no type information
    """The active HAL backend as DeepSpeed's accelerator. Host memory is handled as by DeepSpeed's CPU accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self._backend, self._device = hal.backend(), hal.local_device()
        self._name = self._device.type
        self._communication_backend_name = torch.distributed.get_default_backend_for_device(self._device)
        self._module: Any = torch.get_device_module(self._device)
        self._host = self._name == "cpu"
        self._generator: Any = torch if self._host else self._module
        self._ranges: list[contextlib.AbstractContextManager[Any]] = []

    def is_synchronized_device(self) -> bool:
        return self._host

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._host else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext() if self._host else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        if not self._host:
            self._module.set_device(device_index)

    def current_device(self) -> int:
        return self._device.index or 0

    def current_device_name(self) -> str:
        return str(self._device)

    def device_count(self) -> int:
        return int(self._backend.probe().count)

    def synchronize(self, device_index: int | None = None) -> None:
        self._backend.synchronize()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    # Random state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._generator.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> Any:
        return self._generator.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    manual_seed_all = manual_seed  # one device per process

    # Streams: the CPU has none

    @property
    def Stream(self) -> Any:
        return None if self._host else self._module.Stream

    @property
    def Event(self) -> Any:
        return None if self._host else self._module.Event

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext() if self._host else self._module.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self._host else self._module.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        return None if self._host else self._module.default_stream()

    # Memory: 0 where the backend has no such figure

    def _memory(self, *names: str) -> int:
        stats = self._backend.memory_stats()
        return int(next((stats[name] for name in names if name in stats), 0))

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory("allocated")

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory("peak", "allocated")

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._backend.reset_peak_memory()

    reset_max_memory_allocated = reset_peak_memory_stats

    # Profiles

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        self._ranges.append(self._backend.profile_range(msg))
        self._ranges[-1].__enter__()

    def range_pop(self, domain: Any = None) -> None:
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def get_op_builder(self, class_name: str) -> Any:
        from deepspeed.ops.op_builder.cpu import NotImplementedBuilder

        return NotImplementedBuilder

    def create_op_builder(self, op_name: str) -> Any:
        return None

    def supported_dtypes(self) -> list[torch.dtype]:
        stored = self._backend.capabilities().dtypes
        return [d for d in (torch.float32, torch.bfloat16, torch.float16) if stored is None or d in stored]

    def is_bf16_supported(self) -> bool:
        return torch.bfloat16 in self.supported_dtypes()

    def is_fp16_supported(self) -> bool:
        return torch.float16 in self.supported_dtypes()


def use() -> HalAccelerator:
    """Makes the active backend DeepSpeed's accelerator. Call it before `deepspeed.initialize`."""
    accelerator = HalAccelerator()
    set_accelerator(accelerator)
    return accelerator
