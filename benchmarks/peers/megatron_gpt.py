"""The same GPT in megatron-core: its GPTModel with its own layers, wrapper, schedule and optimizer.

megatron-core is written for NVIDIA devices; hal_device() redirects the CUDA names that it uses to the processor
(docs/megatron.md). It uses none of HAL's ops. The backend is activated but not built, because building cpu_ref would
change malloc's settings, which must be those of the row.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import hal

from ..harness import target
from ..harness.case import Thunk

_redirected: ExitStack | None = None
"""Keeps hal_device() active after `enter` has been called."""


def enter() -> None:
    """Prepares this process permanently for megatron-core, as a world of one rank.

    Raises ImportError where megatron-core is not installed, HalError where it cannot run.
    """
    global _redirected
    if _redirected is not None:
        return
    from megatron.core import parallel_state, tensor_parallel

    from hal.model.megatron import hal_device, join_world

    hal.activate(target.backend())
    stack = ExitStack()
    stack.enter_context(hal_device())
    join_world(rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    _redirected = stack


def gpt(layers: int, hidden: int, heads: int, length: int, vocabulary: int, *, bf16: bool = False) -> Any:
    """A GPTModel: learned positions, layer norm, tanh gelu, biases, tied embedding, no dropout.

    Call `enter` first.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        activation_func=functools.partial(F.gelu, approximate="tanh"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        # These fusions need NVIDIA kernels or compilation, but the peer runs in eager mode.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocabulary, length, share_embeddings_and_output_weights=True)


def losses(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every token, [b, s]."""
    b, s = tokens.shape
    masked = torch.ones(s, s, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    positions = torch.arange(s, device=tokens.device).expand(b, -1)
    result: Tensor = model(tokens, positions, masked, labels=labels)
    return result


def step_of(inner: Any, tokens: Tensor, labels: Tensor, *, bf16: bool) -> Thunk:
    """A function that does one training step like Megatron's own trainer. bf16: with float32 master weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    config, (b, s) = inner.config, tokens.shape
    module = Float16Module(config, inner) if bf16 else inner
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=bf16), module)
    options = OptimizerConfig(
        optimizer="adam", lr=1e-4, weight_decay=0.01, clip_grad=0.0, bf16=bf16, params_dtype=config.params_dtype
    )
    optimizer = get_megatron_optimizer(options, [model])
    for group in optimizer.param_groups:
        group["lr"] = options.lr  # normally set by OptimizerParamScheduler, which is not used here

    def forward(data: Any, model: Any) -> Any:
        return losses(model, tokens, labels), lambda loss: (loss.float().mean(), {"loss": loss.detach()})

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=s,
            micro_batch_size=b,
            forward_only=False,
        )
        optimizer.step()

    return step
