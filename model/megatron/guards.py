"""What megatron-core would do wrong without a word, while it is routed: refused with the reason, or made right."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hal import HalError


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
    """Puts checks in front of what would go wrong, and widens isinstance checks by tensor type.

    Raises HalError without psutil: megatron-core saves checkpoints with it, does not require it, and hangs.
    """
    if importlib.util.find_spec("psutil") is None:
        raise HalError(
            "megatron-core hangs at the first checkpoint without psutil; install it with: pip install psutil"
        )
    schedules, module = core("pipeline_parallel.schedules"), core("transformer.module")
    queue = core("dist_checkpointing.strategies.async_utils").AsyncCallsQueue
    attention = core("transformer.dot_product_attention").DotProductAttention
    checks = {
        (attention, "__init__"): _refuse_context_parallelism,
        (core("transformer.torch_norm").WrappedTorchNorm, "__new__"): _refuse_sequence_parallelism,
        (schedules, "forward_backward_pipelining_with_interleaving"): _refuse_crossed_messages,
        (schedules, "forward_step"): _refuse_autocast,
        (queue, "__init__"): _refuse_persistent_writer,
    }
    places = {
        **{(where, name): _checked(getattr(where, name), check) for (where, name), check in checks.items()},
        (schedules, "deallocate_output_tensor"): _kept_while_sent(schedules.deallocate_output_tensor),
        **{(module, name): (_OfDtype(dtype),) for name, dtype in _BY_TYPE.items()},
    }
    with replaced(places):
        yield


@contextlib.contextmanager
def replaced(places: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Puts objects where (module or class, name) are, and restores what was there, if anything was."""
    before = {(owner, name): vars(owner).get(name, _NOTHING) for owner, name in places}
    for (owner, name), now in places.items():
        setattr(owner, name, now)
    try:
        yield
    finally:
        for (owner, name), then in before.items():
            if then is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, then)


_NOTHING = object()

_BY_TYPE = {"_FLOAT_TYPES": torch.float32, "_HALF_TYPES": torch.float16, "_BF16_TYPES": torch.bfloat16}
"""Where megatron-core asks isinstance(x, torch.HalfTensor or NVIDIA's): other devices' tensors are neither."""


class _OfDtype:
    """`isinstance(x, _OfDtype(d))`: x is a tensor of that dtype, on whatever device."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __instancecheck__(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype == self.dtype


def _checked(own: Callable[..., Any], check: Callable[[Mapping[str, Any]], None]) -> Callable[..., Any]:
    """`own`, with a look at its arguments by name before it runs."""
    signature = inspect.signature(own)

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        check(signature.bind(*args, **kwargs).arguments)
        return own(*args, **kwargs)

    return run


def _refuse_crossed_messages(given: Mapping[str, Any]) -> None:
    model = given["model"]
    config = core("utils").get_model_config(model[0] if isinstance(model, list) else model)
    stages = core("parallel_state").get_pipeline_model_parallel_world_size()
    refuse_crossed_messages(stages, config.batch_p2p_comm, config.overlap_p2p_comm)


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


def _kept_while_sent(own: Callable[..., None]) -> Callable[..., None]:
    """`deallocate_output_tensor` that frees a stage's output only when it has been sent.

    The interleaved schedule calls it while the send is under way, which is sound where memory is freed in the order of
    a stream. gloo reads the memory later, from another thread: what came to lie there would be sent. The schedule waits
    for a send before it begins the next one, so the last few outputs are enough.
    """
    sent: deque[torch.Tensor] = deque(maxlen=4)

    @functools.wraps(own)
    def deallocate(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
        if out is not None and deallocate_pipeline_outputs:
            sent.append(out.detach())
        own(out, deallocate_pipeline_outputs)

    return deallocate


def _refuse_autocast(given: Mapping[str, Any]) -> None:
    """For torch switches NVIDIA's autocast off where there is no such device, with a warning, and trains in float32."""
    if given["config"].enable_autocast:
        raise HalError(
            "enable_autocast=True: megatron-core asks for NVIDIA's autocast, which torch would switch off here and "
            "train in another precision. Set it to False; for bfloat16 use bf16=True and Float16Module (Megatron-LM: "
            "--bf16)."
        )


def _refuse_persistent_writer(given: Mapping[str, Any]) -> None:
    """For its process is a new one, where nothing is routed: it ends at once, and the trainer waits for it forever."""
    if given.get("persistent", False):
        raise HalError(
            "a persistent process for asynchronous checkpoints (Megatron-LM: --async-save with "
            "--use-persistent-ckpt-worker) asks for an NVIDIA device, and the first save would hang. Leave it out: "
            "checkpoints are then written in the training process."
        )


_HALS_LAYERS = (
    "HAL's layers have it: in Megatron-LM's scripts --spec hal.model.megatron gpt_layer_spec, elsewhere "
    "hal.model.megatron's gpt_block_spec(config) as the layers of the GPTModel."
)


def _refuse_context_parallelism(given: Mapping[str, Any]) -> None:
    size = given["config"].context_parallel_size
    if size > 1:
        raise HalError(
            f"context parallelism over {size} ranks: of megatron-core's layers only those of Transformer Engine have "
            f"it. {_HALS_LAYERS}"
        )


def _refuse_sequence_parallelism(given: Mapping[str, Any]) -> None:
    if given["config"].sequence_parallel:
        raise HalError(
            "sequence parallelism: of megatron-core's norms only those of Transformer Engine and apex have it. "
            f"{_HALS_LAYERS}"
        )
