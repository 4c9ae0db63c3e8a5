"""The contexts in which `hal launch` runs unmodified scripts of megatron-core and Megatron-LM on the active backend.

In addition to the names of the device, some functions of the `megatron.training` package are replaced: those that
compile CUDA sources or the datasets' helpers, and its warm-up.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distribution
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hal

from .cuda_patches import hal_device
from .device_proxy import DEVICE_TYPE, NVIDIA
from .guards import replaced
from .op_patches import hal_ops


@contextlib.contextmanager
def running_core(argv: Sequence[str]) -> Iterator[None]:
    """The context in which a script with these arguments runs that has imported `megatron.core`: `hal_device`, and with
    `--spec hal.model.megatron ...` also `hal_ops`.

    Raises what `hal_device` raises.
    """
    with contextlib.ExitStack() as stack:
        if hal.device().type != DEVICE_TYPE:
            if os.environ.get("RANK", "0") == "0":
                note = f"hal launch: {argv[0]} imports megatron.core: {NVIDIA} is redirected to {hal.device()}"
                print(note, file=sys.stderr)
            stack.enter_context(hal_device())
            if hal.device().type != "cpu":
                # Megatron compiles small functions, for which torch has no compiler on devices of other vendors.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(replaced({(dist, "all_reduce"): _carrying_float64(dist.all_reduce)}))
            if _installed_helpers():
                utilities = importlib.import_module("megatron.core.datasets.utils")
                stack.enter_context(replaced({(utilities, "compile_helpers"): lambda: None}))
        if "hal.model.megatron" in argv:
            stack.enter_context(hal_ops())
        yield


@contextlib.contextmanager
def running_training() -> Iterator[None]:
    """The additional context of a script that has imported `megatron.training`."""
    if hal.device().type == DEVICE_TYPE:
        yield
        return
    initialize = importlib.import_module("megatron.training.initialize")
    fused_kernels = importlib.import_module("megatron.legacy.fused_kernels")
    tokenizer = importlib.import_module("megatron.training.tokenizer.tokenizer")
    with replaced(
        {
            (initialize, "_warmup_jit_function"): _without_draws(initialize._warmup_jit_function),
            (fused_kernels, "load"): lambda args: None,  # the original would compile CUDA sources
            (tokenizer, "_vocab_size_with_padding"): _padding_warning(tokenizer._vocab_size_with_padding),
        }
    ):
        yield


def refuse_converter() -> None:
    """Raises HalError if Transformer Engine is missing, without which Megatron-LM's checkpoint converter fails."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise hal.HalError(
            "Megatron-LM's tools/checkpoint/convert.py needs Transformer Engine, also for --saver-transformer-impl "
            "local. `hal convert` reads and writes the same checkpoints without it: hal convert --load DIR --save DIR "
            "--saver megatron --target-tensor-parallel-size N --target-pipeline-parallel-size N"
        )


_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda values: values.sum(0),
    dist.ReduceOp.MIN: lambda values: values.amin(0),
    dist.ReduceOp.MAX: lambda values: values.amax(0),
}


def _carrying_float64(own: Callable[..., Any]) -> Callable[..., Any]:
    """torch.distributed.all_reduce that also takes float64, in which Megatron reduces times, and which HCCL does not:
    the bits are gathered as int64, and every rank reduces them in the same order."""

    @functools.wraps(own)
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if tensor.dtype != torch.float64 or async_op or op not in _REDUCTIONS:
            return own(tensor, op, group, async_op)
        parts = [torch.empty_like(tensor, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous().view(torch.int64), group)
        values = torch.stack([part.cpu().view(torch.float64) for part in parts])
        tensor.copy_(_REDUCTIONS[op](values))
        return None

    return all_reduce


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


def _without_draws(warm_up: Callable[[], None]) -> Callable[[], None]:
    """Megatron's warm-up without its effect on the host's generator. It draws random numbers on the device, as many as
    the tensor-parallel size requires; if the device is the host, initial weights would depend on that size."""

    @functools.wraps(warm_up)
    def warm() -> None:
        with torch.random.fork_rng(devices=[]):
            warm_up()

    return warm


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
