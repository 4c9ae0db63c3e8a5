"""Checks and corrections for cases in which megatron-core would silently compute wrong results outside of CUDA."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import hal
from hal import HalError, ops

from ..common.optional_packages import optional_package

TESTED = "0.16.1"
"""The version of megatron-core that setup.cfg pins and the tests run."""


def core(name: str) -> Any:
    """The module megatron.core.NAME. Raises HalError if megatron-core is not installed."""
    with optional_package(f"megatron.core.{name} cannot be imported", "torch-hal[megatron]"):
        return importlib.import_module(f"megatron.core.{name}")


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Adds checks to functions that would go wrong, and extends isinstance checks of tensor types to all devices.

    Raises HalError without psutil: megatron-core saves checkpoints with it but does not require it, and hangs.
    """
    if importlib.util.find_spec("psutil") is None:
        raise HalError(
            "megatron-core hangs at the first checkpoint without psutil; install it with: pip install psutil"
        )
    installed = importlib.metadata.version("megatron-core")
    if installed != TESTED:
        warnings.warn(
            f"megatron-core {installed} is installed; HAL's routing is tested with {TESTED} (pip install "
            f"megatron-core=={TESTED}). Names of the device that another version brings may not be routed: run "
            "tests/model/megatron/test_source_names.py with it",
            stacklevel=3,
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
        (core("inference.contexts.dynamic_context").DynamicInferenceContext, "__init__"): _refuse_dynamic_batching,
    }
    replacements = {
        **{(owner, name): _checked(getattr(owner, name), check) for (owner, name), check in checks.items()},
        (schedules, "deallocate_output_tensor"): _kept_while_sent(schedules.deallocate_output_tensor),
        **{(module, name): (_OfDtype(dtype),) for name, dtype in _BY_TYPE.items()},
        # The text-generation server asserts that what it sends is on an NVIDIA device.
        (core("inference.communication_utils"), "_is_cuda"): _assert_on_device,
        **_experts(),
        **_bert(),
    }
    with replaced(replacements):
        yield


@contextlib.contextmanager
def replaced(replacements: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replaces attributes, given as (module or class, name), and restores them at the end."""
    before = {(owner, name): vars(owner).get(name, _ABSENT) for owner, name in replacements}
    for (owner, name), now in replacements.items():
        setattr(owner, name, now)
    try:
        yield
    finally:
        for (owner, name), original in before.items():
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _experts() -> dict[tuple[Any, str], Any]:
    """What megatron-core's mixture of experts takes from NVIDIA's libraries, if these are not installed.

    Its router reads a name that it defines with Transformer Engine only, and uses another formula where that is None.
    The product per expert of the package grouped_gemm is HAL's op.
    """
    utilities, grouped = core("transformer.moe.moe_utils"), core("transformer.moe.grouped_gemm_util")
    replacements: dict[tuple[Any, str], Any] = {}
    if not hasattr(utilities, "te_general_gemm"):
        replacements[utilities, "te_general_gemm"] = None
    if grouped.ops is None:
        replacements |= {(grouped, "grouped_gemm"): GroupedProduct, (grouped, "ops"): GroupedProduct}
    return replacements


def _bert() -> dict[tuple[Any, str], Any]:
    """Without Transformer Engine, the spec of BERT's layers that needs it, which pretrain_bert.py imports in any case:
    its use is an error instead of its import."""
    specs = core("models.bert.bert_layer_specs")
    return {} if specs.HAVE_TE else {(specs, "get_bert_layer_with_transformer_engine_spec"): _NeedsTransformerEngine}


class _NeedsTransformerEngine:
    def __getattr__(self, name: str) -> Any:
        raise HalError("BERT's default layers need Transformer Engine; --spec local has the same layers without it")


class GroupedProduct:
    """Replaces the package grouped_gemm, by HAL's op."""

    @staticmethod
    def gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
        """a_i b_i for every group a_i of rows. a [n, k]; b [groups, k, m], or [groups, m, k] with trans_b; batch_sizes
        [groups] int64, on any device, as megatron-core keeps it on the host."""
        weight = b if trans_b else b.transpose(1, 2)
        product: torch.Tensor = ops.grouped_linear(a, weight, batch_sizes.to(a.device))
        return product


def _assert_on_device(tensor: torch.Tensor) -> None:
    assert tensor.device.type == hal.device().type, f"{tensor.device} instead of {hal.device()}"


_ABSENT = object()

_BY_TYPE = {"_FLOAT_TYPES": torch.float32, "_HALF_TYPES": torch.float16, "_BF16_TYPES": torch.bfloat16}
"""megatron-core tests isinstance(x, torch.HalfTensor or NVIDIA's type), which tensors of other devices are not."""


class _OfDtype:
    """`isinstance(x, _OfDtype(d))`: whether x is a tensor of dtype d, on any device."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __instancecheck__(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype == self.dtype


def _checked(own: Callable[..., Any], check: Callable[[Mapping[str, Any]], None]) -> Callable[..., Any]:
    """`own` with a check of its arguments (by name) before it runs."""
    signature = inspect.signature(own)

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        check(signature.bind(*args, **kwargs).arguments)
        return own(*args, **kwargs)

    return run


def _refuse_crossed_messages(arguments: Mapping[str, Any]) -> None:
    model = arguments["model"]
    config = core("utils").get_model_config(model[0] if isinstance(model, list) else model)
    stages = core("parallel_state").get_pipeline_model_parallel_world_size()
    refuse_crossed_messages(stages, config.batch_p2p_comm, config.overlap_p2p_comm)


def refuse_crossed_messages(stages: int, batch_p2p_comm: bool, overlap_p2p_comm: bool) -> None:
    """Raises HalError for the interleaved schedule over two stages with megatron-core's default point-to-point flags.

    With two stages, the previous and the next stage are the same process, and a batch has messages in both directions,
    which are matched by order alone: activations are received as gradients, and training continues with wrong numbers.
    Megatron-LM's argument parser refuses this; megatron-core does not. See NVIDIA/Megatron-LM#750.
    """
    if stages == 2 and batch_p2p_comm and not overlap_p2p_comm:
        raise HalError(
            "the interleaved schedule over 2 pipeline stages with batch_p2p_comm=True and overlap_p2p_comm=False "
            "(megatron-core's defaults) mixes up activations and gradients and trains on wrong numbers: both go to the "
            "same process in one batch. Set overlap_p2p_comm=True and batch_p2p_comm=False, or use more stages."
        )


def _kept_while_sent(own: Callable[..., None]) -> Callable[..., None]:
    """`deallocate_output_tensor` that keeps a stage's output alive until it has been sent.

    The interleaved schedule calls it while the send is in progress. That is safe if memory is freed in stream order,
    but gloo reads the memory later from another thread, when it may have been reused. The schedule waits for a send
    before it starts the next one, so keeping the last few outputs is enough.
    """
    sent: deque[torch.Tensor] = deque(maxlen=4)

    @functools.wraps(own)
    def deallocate(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
        if out is not None and deallocate_pipeline_outputs:
            sent.append(out.detach())
        own(out, deallocate_pipeline_outputs)

    return deallocate


def _refuse_autocast(arguments: Mapping[str, Any]) -> None:
    """Without an NVIDIA device, torch disables its autocast with a warning, and training would run in float32."""
    if arguments["config"].enable_autocast:
        raise HalError(
            "enable_autocast=True: megatron-core uses NVIDIA's autocast, which torch would disable here, and would "
            "train in another precision. Set it to False; for bfloat16 use bf16=True and Float16Module (Megatron-LM: "
            "--bf16)."
        )


def _refuse_persistent_writer(arguments: Mapping[str, Any]) -> None:
    """The writer's process is not patched, so it would fail immediately and the trainer would wait for it forever."""
    if arguments.get("persistent", False):
        raise HalError(
            "a persistent process for asynchronous checkpoints (Megatron-LM: --async-save with "
            "--use-persistent-ckpt-worker) needs an NVIDIA device, and the first save would hang. Leave it out: "
            "checkpoints are then written by the training process."
        )


def _refuse_dynamic_batching(arguments: Mapping[str, Any]) -> None:
    """megatron-core's StaticInferenceEngine catches this, says why, and generates with its static batches."""
    raise HalError(
        "megatron-core's dynamic batching computes attention over its paged cache with flash-attn, which needs an "
        "NVIDIA device. Its static engine generates here: examples/inference/gpt/gpt_static_inference.py or "
        "tools/run_text_generation_server.py"
    )


_HALS_LAYERS = (
    "HAL's layers support it: in Megatron-LM's scripts --spec hal.model.megatron gpt_layer_spec, elsewhere "
    "hal.model.megatron's gpt_block_spec(config) as the layers of the GPTModel."
)


def _refuse_context_parallelism(arguments: Mapping[str, Any]) -> None:
    size = arguments["config"].context_parallel_size
    if size > 1:
        raise HalError(
            f"context parallelism over {size} ranks: of megatron-core's layers only those of Transformer Engine "
            f"support it. {_HALS_LAYERS}"
        )


def _refuse_sequence_parallelism(arguments: Mapping[str, Any]) -> None:
    if arguments["config"].sequence_parallel:
        raise HalError(
            "sequence parallelism: of megatron-core's norms only those of Transformer Engine and apex support it. "
            f"{_HALS_LAYERS}"
        )
