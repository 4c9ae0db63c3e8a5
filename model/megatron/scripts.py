"""Megatron-LM's own training scripts, unchanged, on the active backend: what `hal launch` runs them under.

Beside megatron-core's names, `SCRIPTS` routes those of the `megatron.training` package. Whether there is an NVIDIA
device, how many and of what kind, is answered to two of its modules alone, through their own view of torch:
torch.compile would believe the answers and fail.
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

from .guards import replaced
from .place import ASKED_FOR, NVIDIA, Place
from .placing import hal_ops
from .routing import CORE, Make, hal_device
from .world import transport

SCRIPTS: Mapping[str, Make] = {
    "torch.cuda.set_device": lambda place, own: place.set_device,
    "torch.cuda.empty_cache": lambda place, own: place.empty_cache,
    "torch.cuda.memory_allocated": lambda place, own: place.memory("allocated"),
    "torch.cuda.max_memory_allocated": lambda place, own: place.memory("peak"),
    "torch.cuda.memory_reserved": lambda place, own: place.memory("reserved"),
    "torch.cuda.max_memory_reserved": lambda place, own: place.memory("reserved"),
    "torch.cuda.Stream": lambda place, own: place.stream_type,
    "torch.cuda.current_stream": lambda place, own: place.current_stream,
    "torch.cuda.stream": lambda place, own: place.use_stream,
    "torch.rand": lambda place, own: place.factory(own),
    "torch.nn.Module.cuda": lambda place, own: place.move_module(own),
    "torch.distributed.init_process_group": lambda place, own: _joins(place, own),
}
"""What megatron.training needs beyond `CORE`."""


@contextlib.contextmanager
def running_script(argv: Sequence[str], load: Callable[[], object]) -> Iterator[None]:
    """Where a Megatron-LM script with these arguments runs from the moment that it imports `megatron.training`, which
    `load` does. With `--spec hal.model.megatron ...` also in `hal_ops()`.

    Raises what `hal_device` raises, and whatever that import does.
    """
    with contextlib.ExitStack() as stack:
        if hal.device().type == ASKED_FOR:
            load()
        else:
            if os.environ.get("RANK", "0") == "0":
                said = f"hal launch: {argv[0]} imports megatron.training: {NVIDIA} means {hal.device()} in it"
                print(said, file=sys.stderr)
            stack.enter_context(hal_device({**CORE, **SCRIPTS}))
            load()
            stack.enter_context(replaced(_in_megatron_training(Place(hal.backend()))))
        if "hal.model.megatron" in argv:
            stack.enter_context(hal_ops())
        yield


def _in_megatron_training(place: Place) -> dict[tuple[Any, str], Any]:
    initialize = importlib.import_module("megatron.training.initialize")
    fused_kernels = importlib.import_module("megatron.legacy.fused_kernels")
    tokenizer = importlib.import_module("megatron.training.tokenizer.tokenizer")
    devices = max(place.backend.probe().count, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    utils = importlib.import_module("megatron.training.utils")
    found: dict[tuple[Any, str], Any] = {}
    if _installed_helpers():
        found[importlib.import_module("megatron.core.datasets.utils"), "compile_helpers"] = lambda: None
    return {
        **found,
        (initialize, "torch"): _answering(is_available=lambda: True, device_count=lambda: devices),
        (utils, "torch"): _answering(get_device_properties=lambda device=None: _properties(place)),
        (initialize, "_warmup_jit_function"): _drawing_nothing(initialize._warmup_jit_function),
        (fused_kernels, "load"): lambda args: None,  # CUDA sources, for a device that is not there
        (tokenizer, "_vocab_size_with_padding"): _reported(tokenizer._vocab_size_with_padding),
    }


def _installed_helpers() -> bool:
    """Whether the datasets' compiled helpers can be imported: from the script's own tree or, for a tree of the same
    version as the installed megatron-core, from there. If not, the script compiles them itself (make, pybind11)."""
    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is not None:
        return True
    installed = distribution("megatron-core")
    suffixes = tuple(f"helpers_cpp{s}" for s in EXTENSION_SUFFIXES)
    files = [f for f in installed.files or () if f.name.endswith(suffixes)]
    if importlib.import_module("megatron.core").__version__ != installed.version or not files:
        return False
    spec = importlib.util.spec_from_file_location(name, installed.locate_file(files[0]))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return True


def _answering(**answers: Any) -> ModuleType:
    """torch, for a module whose questions about the NVIDIA device are answered by these."""
    return _View(torch, {ASKED_FOR: _View(getattr(torch, ASKED_FOR), answers)})


class _View(ModuleType):
    """A module with some attributes answered otherwise, for whoever holds this view of it."""

    def __init__(self, module: ModuleType, answers: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(answers)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _joins(place: Place, own: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group, where NVIDIA's transport means the backend's."""

    def join(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return own(transport() if backend in (None, "nccl") else backend, *args, **kwargs)

    return join


def _drawing_nothing(warm_up: Callable[[], None]) -> Callable[[], None]:
    """Megatron's warm-up, which draws as many numbers on the device as the tensor-parallel size makes it. Where device
    and host are one, the initial weights, drawn on the host after it, would depend on that."""

    @functools.wraps(warm_up)
    def warm() -> None:
        with torch.random.fork_rng(devices=[]):
            warm_up()

    return warm


def _properties(place: Place) -> SimpleNamespace:
    """Megatron asks for the architecture only to demand a setting of NVIDIA's driver before version 10."""
    total = place.backend.memory_stats().get("total", 0)
    return SimpleNamespace(name=place.backend.name, major=10, minor=0, total_memory=total)


def _reported(pad: Callable[..., int]) -> Callable[..., int]:
    """Megatron's padding of the vocabulary, with a warning when it changes what is computed."""

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
