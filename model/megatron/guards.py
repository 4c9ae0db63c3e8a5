"""What megatron-core would do wrong without a word: refused, with the reason, while it is routed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hal import HalError

_INTERLEAVED = "forward_backward_pipelining_with_interleaving"


def core(name: str) -> Any:
    """The module megatron.core.NAME. Raises HalError if megatron-core is not installed."""
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ImportError as error:
        raise HalError(
            f"megatron.core.{name} cannot be imported ({error}); install it with: pip install 'torch-hal[megatron]'"
        ) from None


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Puts the check of the interleaved schedule in front of it, and widens isinstance checks by tensor type.

    Raises HalError without psutil: megatron-core saves checkpoints with it, does not require it, and hangs.
    """
    if importlib.util.find_spec("psutil") is None:
        raise HalError(
            "megatron-core hangs at the first checkpoint without psutil; install it with: pip install psutil"
        )
    schedules, module = core("pipeline_parallel.schedules"), core("transformer.module")
    places = {
        (schedules, _INTERLEAVED): _checked(getattr(schedules, _INTERLEAVED)),
        **{(module, name): (_OfDtype(dtype),) for name, dtype in _BY_TYPE.items()},
    }
    with replaced(places):
        yield


@contextlib.contextmanager
def replaced(places: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Puts objects where (module, name) are, and restores what was there."""
    before = {(module, name): getattr(module, name) for module, name in places}
    for (module, name), now in places.items():
        setattr(module, name, now)
    try:
        yield
    finally:
        for (module, name), then in before.items():
            setattr(module, name, then)


_BY_TYPE = {"_FLOAT_TYPES": torch.float32, "_HALF_TYPES": torch.float16, "_BF16_TYPES": torch.bfloat16}
"""Where megatron-core asks isinstance(x, torch.HalfTensor or NVIDIA's): other devices' tensors are neither."""


class _OfDtype:
    """`isinstance(x, _OfDtype(d))`: x is a tensor of that dtype, on whatever device."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __instancecheck__(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype == self.dtype


def _checked(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"]
        config = core("utils").get_model_config(model[0] if isinstance(model, list) else model)
        stages = core("parallel_state").get_pipeline_model_parallel_world_size()
        refuse_crossed_messages(stages, config.batch_p2p_comm, config.overlap_p2p_comm)
        return schedule(*args, **kwargs)

    return run


def refuse_crossed_messages(stages: int, batch_p2p_comm: bool, overlap_p2p_comm: bool) -> None:
    """Raises HalError for interleaving over two stages with core's default point-to-point flags.

    With two stages the previous and the next stage are the same process, and a batch holds messages in both
    directions, which are matched by order alone: activations are taken for gradients. The run goes on, with wrong
    numbers. Megatron-LM's argument parser refuses it; megatron-core does not. See NVIDIA/Megatron-LM#750.
    """
    if stages == 2 and batch_p2p_comm and not overlap_p2p_comm:
        raise HalError(
            "the interleaved schedule over 2 pipeline stages with batch_p2p_comm=True and overlap_p2p_comm=False "
            "(megatron-core's defaults) mixes up activations and gradients and trains on wrong numbers: both go to the "
            "same process in one batch. Set overlap_p2p_comm=True and batch_p2p_comm=False, or use more stages."
        )
