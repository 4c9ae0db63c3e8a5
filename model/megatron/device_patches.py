"""`DEVICE`: all names by which a program refers to the NVIDIA device in torch, and their replacements.

Factory functions are those that torch itself lists as taking a device (torch.set_default_device routes the same ones).
Patches are used and not a TorchFunctionMode, because a mode acts in one thread: gradients of a device are computed in
torch's own threads, where recomputed layers must find the device as well (ADR 0041).

Queries by which torch or megatron-core choose code for NVIDIA's libraries return torch's own result to these packages
(`_TRUTH`), and the result for the backend's device to all other callers.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import _device_constructors

from .device_proxy import DeviceProxy
from .init_distributed import transport

Make = Callable[[DeviceProxy, Any], Any]
"""(proxy, torch's own object) -> its replacement."""

_TRUTH = ("torch", "triton", "transformer_engine", "apex", "megatron.core")
"""Packages that query the NVIDIA device in order to use its compiler or its libraries."""

NEWEST = (10, 0)
"""The compute capability that scripts get: scripts use it to require features, and HAL's ops refuse what they lack."""


def _factories() -> dict[str, Make]:
    """torch's functions that create tensors on a device, by name."""
    own = (f for f in _device_constructors() if isinstance(f, types.BuiltinFunctionType))
    names = sorted(f.__name__ for f in own if getattr(torch, f.__name__, None) is f)
    like = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
    return {f"torch.{name}": lambda proxy, own: proxy.factory(own) for name in (*names, *like)}


def _methods() -> dict[str, Make]:
    new = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
    return {f"torch.Tensor.{name}": lambda proxy, own: proxy.factory(own) for name in new}


def _tensor_types() -> dict[str, Make]:
    kinds = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
    return {f"torch.cuda.{kind}Tensor": lambda proxy, own: proxy.tensor_type(own) for kind in kinds}


DEVICE: Mapping[str, Make] = {
    **_factories(),
    **_methods(),
    **_tensor_types(),
    "torch.Tensor.to": lambda proxy, own: proxy.convert(own),
    "torch.Tensor.pin_memory": lambda proxy, own: (lambda tensor, *a, **k: tensor) if proxy.host else own,
    "torch.nn.Module.to_empty": lambda proxy, own: proxy.to_empty(own),
    "torch.nn.Module.cuda": lambda proxy, own: proxy.move_module(own),
    "torch.cuda.is_available": lambda proxy, own: _to_scripts(own, lambda: True),
    "torch.cuda.device_count": lambda proxy, own: _to_scripts(own, lambda: _count(proxy)),
    "torch.cuda.set_device": lambda proxy, own: proxy.set_device,
    "torch.cuda.get_device_name": lambda proxy, own: _to_scripts(own, lambda device=None: proxy.backend.name),
    "torch.cuda.get_device_capability": lambda proxy, own: _to_scripts(own, lambda device=None: NEWEST),
    "torch.cuda.get_device_properties": lambda proxy, own: _to_scripts(own, lambda device=None: _properties(proxy)),
    "torch.cuda.manual_seed_all": lambda proxy, own: proxy.manual_seed,
    "torch.cuda.seed": lambda proxy, own: lambda: proxy.manual_seed(torch.seed()),
    "torch.cuda.empty_cache": lambda proxy, own: proxy.empty_cache,
    "torch.cuda.memory_allocated": lambda proxy, own: proxy.memory("allocated"),
    "torch.cuda.max_memory_allocated": lambda proxy, own: proxy.memory("peak"),
    "torch.cuda.memory_reserved": lambda proxy, own: proxy.memory("reserved"),
    "torch.cuda.max_memory_reserved": lambda proxy, own: proxy.memory("reserved"),
    "torch.cuda.memory_stats": lambda proxy, own: proxy.memory_stats,
    "torch.cuda.reset_peak_memory_stats": lambda proxy, own: lambda device=None: proxy.backend.reset_peak_memory(),
    "torch.cuda.Stream": lambda proxy, own: proxy.stream_type,
    "torch.cuda.Event": lambda proxy, own: proxy.event_type,
    "torch.cuda.current_stream": lambda proxy, own: proxy.current_stream,
    "torch.cuda.default_stream": lambda proxy, own: proxy.current_stream,
    "torch.cuda.stream": lambda proxy, own: proxy.use_stream,
    "torch.cuda.set_stream": lambda proxy, own: proxy.set_stream,
    "torch.distributed.init_process_group": lambda proxy, own: _with_transport(own),
    "torch.distributed.new_group": lambda proxy, own: _with_transport(own),
    "torch.distributed.all_to_all_single": lambda proxy, own: _lists_of_sizes(own),
}
"""Names of the NVIDIA device that programs use in addition to `cuda_patches.CORE`."""


def _to_scripts(own: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """A query that returns torch's result to the packages of `_TRUTH`, and the backend's to all other callers."""

    @functools.wraps(own)
    def asked(*args: Any, **kwargs: Any) -> Any:
        # The module of the calling frame identifies the caller; the dot makes "torchvision" differ from "torch".
        asking = f"{sys._getframe(1).f_globals.get('__name__', '')}."
        asked_by_torch = any(asking.startswith(f"{package}.") for package in _TRUTH)
        return (own if asked_by_torch else answer)(*args, **kwargs)

    return asked


def _count(proxy: DeviceProxy) -> int:
    """The devices of this machine; on a backend whose processes share one device, as many as there are processes."""
    return max(proxy.backend.probe().count, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _properties(proxy: DeviceProxy) -> SimpleNamespace:
    total = proxy.backend.memory_stats().get("total", 0)
    return SimpleNamespace(name=proxy.backend.name, major=NEWEST[0], minor=NEWEST[1], total_memory=total)


def _with_transport(own: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group and new_group that use the backend's transport instead of NCCL.

    The default group is not bound to a device: torch would then refuse the additional gloo groups of megatron-core.
    """
    signature = "ranks" if own.__name__ == "new_group" else "backend"

    @functools.wraps(own)
    def join(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if signature == "backend":
            name = args[0] if args else kwargs.pop("backend", None)
            return own(transport() if name in (None, "nccl") else name, *args[1:], **kwargs)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = transport()
            kwargs.pop("pg_options", None)
        return own(*args, **kwargs)

    return join


def _lists_of_sizes(own: Callable[..., Any]) -> Callable[..., Any]:
    """all_to_all_single that accepts split sizes as tensors, as NCCL's does; others read them as integers."""

    @functools.wraps(own)
    def exchange(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **k: Any,
    ) -> Any:
        sizes = (_integers(output_split_sizes), _integers(input_split_sizes))
        return own(output, input, *sizes, **k)

    return exchange


def _integers(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
