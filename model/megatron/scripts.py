"""The context in which `hal launch` runs unmodified Megatron-LM training scripts on the active backend.

In addition to megatron-core's names, `SCRIPTS` patches those of the `megatron.training` package. Queries for NVIDIA
devices (availability, number, properties) are answered for only two of its modules, through a wrapped torch module:
torch.compile would otherwise rely on these answers and fail.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distribution
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

import hal

from .cuda_patches import CORE, Make, hal_device
from .device_proxy import DEVICE_TYPE, NVIDIA, DeviceProxy
from .guards import replaced
from .init_distributed import transport
from .op_patches import hal_ops

SCRIPTS: Mapping[str, Make] = {
    "torch.cuda.set_device": lambda proxy, own: proxy.set_device,
    "torch.cuda.empty_cache": lambda proxy, own: proxy.empty_cache,
    "torch.cuda.memory_allocated": lambda proxy, own: proxy.memory("allocated"),
    "torch.cuda.max_memory_allocated": lambda proxy, own: proxy.memory("peak"),
    "torch.cuda.memory_reserved": lambda proxy, own: proxy.memory("reserved"),
    "torch.cuda.max_memory_reserved": lambda proxy, own: proxy.memory("reserved"),
    "torch.cuda.Stream": lambda proxy, own: proxy.stream_type,
    "torch.cuda.current_stream": lambda proxy, own: proxy.current_stream,
    "torch.cuda.stream": lambda proxy, own: proxy.use_stream,
    "torch.rand": lambda proxy, own: proxy.factory(own),
    "torch.nn.Module.cuda": lambda proxy, own: proxy.move_module(own),
    "torch.distributed.init_process_group": lambda proxy, own: _init_process_group(proxy, own),
}
"""The names that megatron.training needs in addition to `CORE`."""


@contextlib.contextmanager
def running_script(argv: Sequence[str], load: Callable[[], object]) -> Iterator[None]:
    """The context in which a Megatron-LM script with these arguments runs. `load` imports `megatron.training`. With
    `--spec hal.model.megatron ...` the context includes `hal_ops()`.

    Raises what `hal_device` raises, and what the import raises.
    """
    with contextlib.ExitStack() as stack:
        if hal.device().type == DEVICE_TYPE:
            load()
        else:
            if os.environ.get("RANK", "0") == "0":
                note = f"hal launch: {argv[0]} imports megatron.training: {NVIDIA} is redirected to {hal.device()}"
                print(note, file=sys.stderr)
            stack.enter_context(hal_device({**CORE, **SCRIPTS}))
            load()
            stack.enter_context(replaced(_training_replacements(DeviceProxy(hal.backend()))))
        if "hal.model.megatron" in argv:
            stack.enter_context(hal_ops())
        yield


def _training_replacements(proxy: DeviceProxy) -> dict[tuple[Any, str], Any]:
    initialize = importlib.import_module("megatron.training.initialize")
    fused_kernels = importlib.import_module("megatron.legacy.fused_kernels")
    tokenizer = importlib.import_module("megatron.training.tokenizer.tokenizer")
    devices = max(proxy.backend.probe().count, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    utils = importlib.import_module("megatron.training.utils")
    replacements: dict[tuple[Any, str], Any] = {}
    if _installed_helpers():
        replacements[importlib.import_module("megatron.core.datasets.utils"), "compile_helpers"] = lambda: None
    return {
        **replacements,
        (initialize, "torch"): _torch_with(is_available=lambda: True, device_count=lambda: devices),
        (utils, "torch"): _torch_with(get_device_properties=lambda device=None: _properties(proxy)),
        (initialize, "_warmup_jit_function"): _without_draws(initialize._warmup_jit_function),
        (fused_kernels, "load"): lambda args: None,  # the original would compile CUDA sources
        (tokenizer, "_vocab_size_with_padding"): _padding_warning(tokenizer._vocab_size_with_padding),
    }


def _installed_helpers() -> bool:
    """Whether the compiled helpers of the datasets can be imported: from the script's own source tree, or from the
    installed megatron-core if it has the same version. Otherwise the script compiles them (make, pybind11)."""
    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is not None:
        return True
    installed = distribution("megatron-core")
    suffixes = tuple(f"helpers_cpp{s}" for s in EXTENSION_SUFFIXES)
    files = [f for f in installed.files or () if f.name.endswith(suffixes)]
    if importlib.import_module("megatron.core").__version__ != installed.version or not files:
        return False
    spec = importlib.util.spec_from_file_location(name, str(installed.locate_file(files[0])))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return True


def _torch_with(**answers: Any) -> ModuleType:
    """A torch module whose functions for the NVIDIA device are replaced by these answers."""
    return _View(torch, {DEVICE_TYPE: _View(getattr(torch, DEVICE_TYPE), answers)})


class _View(ModuleType):
    """A module with some attributes replaced, for those that import this object instead of the module."""

    def __init__(self, module: ModuleType, answers: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(answers)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _init_process_group(proxy: DeviceProxy, own: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group that uses the backend's transport instead of NCCL."""

    def join(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return own(transport() if backend in (None, "nccl") else backend, *args, **kwargs)

    return join


def _without_draws(warm_up: Callable[[], None]) -> Callable[[], None]:
    """Megatron's warm-up without its effect on the host's generator. It draws random numbers on the device, as many as
    the tensor-parallel size requires; if the device is the host, initial weights would depend on that size."""

    @functools.wraps(warm_up)
    def warm() -> None:
        with torch.random.fork_rng(devices=[]):
            warm_up()

    return warm


def _properties(proxy: DeviceProxy) -> SimpleNamespace:
    """Megatron reads the architecture only to require a setting of NVIDIA's driver before version 10."""
    total = proxy.backend.memory_stats().get("total", 0)
    return SimpleNamespace(name=proxy.backend.name, major=10, minor=0, total_memory=total)


def _padding_warning(pad: Callable[..., int]) -> Callable[..., int]:
    """Megatron's padding of the vocabulary, with a warning if it changes the results."""

    def padded(size: int, args: Any, *rest: Any, **kwargs: Any) -> int:
        after = pad(size, args, *rest, **kwargs)
        if after != size and args.rank == 0:
            warnings.warn(
                f"the vocabulary of {size} is padded to {after} (a multiple of --make-vocab-size-divisible-by "
                f"{args.make_vocab_size_divisible_by} x tensor-parallel size {args.tensor_model_parallel_size}). The "
                "padding takes part in the softmax: runs with another padding have other losses. To compare tensor-"
                "parallel sizes, keep the product the same.",
                stacklevel=2,
            )
        return after

    return padded
