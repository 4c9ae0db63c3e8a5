"""The active backend's device with the interface of torch.cuda: current device, generators, factories, type names.

Functions that HAL's contract covers are the backend's (device, synchronize, memory). The others (generators, streams,
the current device) are those of the device's torch module, from torch.get_device_module.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import hal

NVIDIA = "torch.cuda"
"""Name of the torch module that megatron-core uses. It is only named here, never imported."""

DEVICE_TYPE = NVIDIA.rpartition(".")[2]
"""The device type that megatron-core requests."""


class DeviceProxy:
    """Replaces the NVIDIA device for megatron-core. Methods have the signatures of the functions they replace."""

    def __init__(self, backend: hal.Backend) -> None:
        self.backend = backend
        self.type = backend.device().type
        self.module: Any = torch.get_device_module(self.type)
        self.generators = _Generators(self)

    @property
    def host(self) -> bool:
        """Whether the device is the CPU, which has no separate generators, streams or allocator."""
        return self.type == "cpu"

    def current(self) -> torch.device:
        """The current device, as a torch.device: megatron-core uses it both as `device=` and as an index."""
        index = self.module.current_device()
        return torch.device(self.type, index) if isinstance(index, int) else torch.device(self.type)

    def synchronize(self, device: Any = None) -> None:
        self.backend.synchronize()

    def generator(self, device: Any = None) -> torch.Generator:
        """The default generator of the device."""
        own = getattr(self.module, "default_generators", None)
        return torch.default_generator if own is None else own[self.current().index]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.generator().get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        self.generator().set_state(new_state)

    def manual_seed(self, seed: int) -> None:
        self.generator().manual_seed(seed)

    def is_requested(self, device: Any) -> bool:
        """Whether `device` (a name, a torch.device, None) means the NVIDIA device."""
        if isinstance(device, str):
            return device.partition(":")[0] == DEVICE_TYPE
        return isinstance(device, torch.device) and device.type == DEVICE_TYPE

    def factory(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """torch's function `own`, which creates the tensor on this device if the NVIDIA device is requested."""

        @functools.wraps(own)
        def make(*args: Any, **kwargs: Any) -> Any:
            if self.is_requested(kwargs.get("device")):
                kwargs["device"] = self.current()
            if self.host:
                kwargs.pop("pin_memory", None)  # pinned memory is for copies to another device
            return own(*args, **kwargs)

        return make

    def convert(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Tensor.to, to this device if the NVIDIA device is requested."""

        @functools.wraps(own)
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if args and self.is_requested(args[0]):
                args = (self.current(), *args[1:])
            elif self.is_requested(kwargs.get("device")):
                kwargs["device"] = self.current()
            return own(tensor, *args, **kwargs)

        return to

    def to_empty(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Module.to_empty, on this device if the NVIDIA device is requested."""

        @functools.wraps(own)
        def to_empty(module: torch.nn.Module, *, device: Any, recurse: bool = True) -> Any:
            return own(module, device=self.current() if self.is_requested(device) else device, recurse=recurse)

        return to_empty

    def move_tensor(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def to_here(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
            return tensor.to(self.current(), non_blocking=non_blocking, **kwargs)

        return to_here

    def move_module(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def to_here(module: torch.nn.Module, device: Any = None) -> Any:
            return module.to(self.current())

        return to_here

    def type_name(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Tensor.type, which returns NVIDIA's type names for tensors of this device: megatron-core compares names."""

        def named(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
            if dtype is not None:
                return own(tensor, dtype, non_blocking, **kwargs)
            name = own(tensor)
            return f"{NVIDIA}.{name.rpartition('.')[2]}" if tensor.device.type == self.type else name

        return named

    def memory(self, name: str) -> Callable[..., int]:
        """A counter of `Backend.memory_stats`; 0 if the device does not have it."""
        return lambda device=None: self.backend.memory_stats().get(name, 0)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """torch.cuda.memory_stats from `Backend.memory_stats`, in bytes; counters that the device lacks are 0."""
        stats = self.backend.memory_stats()
        counters = {
            "allocated_bytes.all.current": stats.get("allocated", 0),
            "allocated_bytes.all.peak": stats.get("peak", 0),
            "reserved_bytes.all.current": stats.get("reserved", 0),
            "reserved_bytes.all.peak": stats.get("reserved", 0),
        }
        return defaultdict(int, counters)

    def tensor_type(self, own: Any) -> TensorType:
        return TensorType(self, own.dtype)

    def set_device(self, device: Any) -> None:
        index = device.index if isinstance(device, torch.device) else device
        if not self.host and index is not None:
            self.module.set_device(index)

    def empty_cache(self) -> None:
        """Releases cached memory, if the device has a cache."""
        if hasattr(self.module, "empty_cache"):
            self.module.empty_cache()

    @property
    def stream_type(self) -> Any:
        """The device's Stream class; on the host, one that executes work immediately."""
        return _HostStream if self.host else self.module.Stream

    @property
    def event_type(self) -> Any:
        """The device's Event class; on the host, one that takes the time when it is recorded."""
        return _HostEvent if self.host else self.module.Event

    def set_stream(self, stream: Any) -> None:
        if not self.host:
            self.module.set_stream(stream)

    def current_stream(self, device: Any = None) -> Any:
        return _HostStream() if self.host else self.module.current_stream()

    def use_stream(self, stream: Any) -> Any:
        return contextlib.nullcontext(stream) if self.host else self.module.stream(stream)


class TensorType:
    """torch.cuda.LongTensor and the like: constructs tensors of `dtype` on the device, from a size or from values;
    isinstance(x, it) is whether x is such a tensor."""

    def __init__(self, proxy: DeviceProxy, dtype: torch.dtype) -> None:
        self.proxy, self.dtype = proxy, dtype

    def __call__(self, *args: Any) -> torch.Tensor:
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.proxy.current()}
        if all(isinstance(size, int) for size in args):
            return torch.empty(args or (0,), **options)
        (values,) = args
        return torch.empty(values, **options) if isinstance(values, torch.Size) else torch.tensor(values, **options)

    def __instancecheck__(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype == self.dtype and x.device.type == self.proxy.type


class _HostStream:
    """A stream of a device that executes synchronously."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: _HostEvent | None = None) -> _HostEvent:
        event = _HostEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _HostEvent:
    """An event of a device that executes synchronously: it has happened when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time: float | None = None

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostEvent) -> float:
        """Milliseconds from this event to `end`. Raises RuntimeError unless both were recorded."""
        if self.time is None or end.time is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return (end.time - self.time) * 1e3


class _Generators:
    """`default_generators[device or index]`."""

    def __init__(self, proxy: DeviceProxy) -> None:
        self.proxy = proxy

    def __getitem__(self, device: Any) -> torch.Generator:
        return self.proxy.generator(device)
