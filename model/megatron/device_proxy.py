"""The active backend's device, as megatron-core asks for one: current device, generators, factories, type names.

What HAL's contract covers goes through the backend (device, synchronize, memory); the rest (generators, streams, which
device is current) through the device's own torch module, which torch.get_device_module finds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

import hal

NVIDIA = "torch.cuda"
"""The torch module that megatron-core is written against, by name: nothing here refers to it."""

ASKED_FOR = NVIDIA.rpartition(".")[2]
"""The device type that megatron-core asks for."""


class Place:
    """Stands where megatron-core expects an NVIDIA device. Methods have the signatures of the names they replace."""

    def __init__(self, backend: hal.Backend) -> None:
        self.backend = backend
        self.type = backend.device().type
        self.module: Any = torch.get_device_module(self.type)
        self.generators = _Generators(self)

    @property
    def host(self) -> bool:
        """The device is the processor itself: it has no generators, streams or allocator of its own."""
        return self.type == "cpu"

    def current(self) -> torch.device:
        """The device this process works on. A torch.device: megatron-core uses it as `device=` and as an index."""
        index = self.module.current_device()
        return torch.device(self.type, index) if isinstance(index, int) else torch.device(self.type)

    def synchronize(self, device: Any = None) -> None:
        self.backend.synchronize()

    def generator(self, device: Any = None) -> torch.Generator:
        """The generator that operations on the device draw from."""
        own = getattr(self.module, "default_generators", None)
        return torch.default_generator if own is None else own[self.current().index]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.generator().get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        self.generator().set_state(new_state)

    def manual_seed(self, seed: int) -> None:
        self.generator().manual_seed(seed)

    def asked_for(self, device: Any) -> bool:
        """Whether `device` (a name, a torch.device, None) means the NVIDIA device."""
        if isinstance(device, str):
            return device.partition(":")[0] == ASKED_FOR
        return isinstance(device, torch.device) and device.type == ASKED_FOR

    def factory(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """torch's function `own`, making its tensor here when asked for the NVIDIA device."""

        @functools.wraps(own)
        def make(*args: Any, **kwargs: Any) -> Any:
            if self.asked_for(kwargs.get("device")):
                kwargs["device"] = self.current()
            if self.host:
                kwargs.pop("pin_memory", None)  # nothing is copied, so nothing is copied faster
            return own(*args, **kwargs)

        return make

    def move_tensor(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def to_here(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
            return tensor.to(self.current(), non_blocking=non_blocking, **kwargs)

        return to_here

    def move_module(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def to_here(module: torch.nn.Module, device: Any = None) -> Any:
            return module.to(self.current())

        return to_here

    def type_name(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Tensor.type, where tensors of this device answer as NVIDIA's do: megatron-core compares the names."""

        def named(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
            if dtype is not None:
                return own(tensor, dtype, non_blocking, **kwargs)
            name = own(tensor)
            return f"{NVIDIA}.{name.rpartition('.')[2]}" if tensor.device.type == self.type else name

        return named

    def memory(self, name: str) -> Callable[..., int]:
        """A counter of `Backend.memory_stats`; 0 where the device does not count."""
        return lambda device=None: self.backend.memory_stats().get(name, 0)

    def set_device(self, device: Any) -> None:
        index = device.index if isinstance(device, torch.device) else device
        if not self.host and index is not None:
            self.module.set_device(index)

    def empty_cache(self) -> None:
        """Gives cached memory back, where the device keeps any."""
        if hasattr(self.module, "empty_cache"):
            self.module.empty_cache()

    @property
    def stream_type(self) -> Any:
        """The device's Stream class; torch's host module has one whose work simply runs."""
        return _HostStream if self.host else self.module.Stream

    def current_stream(self, device: Any = None) -> Any:
        return _HostStream() if self.host else self.module.current_stream()

    def use_stream(self, stream: Any) -> Any:
        return contextlib.nullcontext(stream) if self.host else self.module.stream(stream)


class _HostStream:
    """A stream of a device whose work is done when the call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Generators:
    """`default_generators[device or index]`."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __getitem__(self, device: Any) -> torch.Generator:
        return self.place.generator(device)
