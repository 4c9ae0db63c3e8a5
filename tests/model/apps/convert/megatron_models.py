"""megatron-core's own GPTModel on the CPU, for tests: created, initialised, run, and saved in its own formats."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import torch

from hal.model.config.schema import Config


def core_model(config: Config, *, tp: int = 1, pp: int = 1) -> Any:
    """This process's part of the GPTModel (local layers) that `config` describes. Needs an initialised world."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tp, pp)
        gelu = torch.nn.functional.gelu
        settings = TransformerConfig(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups,
            kv_channels=config.kv_channels,
            normalization=config.normalization,
            layernorm_epsilon=config.norm_epsilon,
            gated_linear_unit=config.swiglu,
            activation_func=torch.nn.functional.silu if config.swiglu else lambda x: gelu(x, approximate="tanh"),
            add_bias_linear=not config.disable_bias_linear,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.float32,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            masked_softmax_fusion=False,
        )
        return GPTModel(
            settings,
            get_gpt_layer_local_spec(normalization=config.normalization),
            config.padded_vocab_size,
            config.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            rotary_base=int(config.rotary_base),
        )


def without_a_gpu() -> None:
    """Prepares this process, which must belong to one test, for megatron-core's forward pass and saving."""
    from megatron.core.tensor_parallel import random as core_random

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *a: None
    core_random.CudaRNGStatesTracker.fork = lambda self, *a: contextlib.nullcontext()
    multiprocessing.current_process()._config["daemon"] = False  # saving starts child processes


def randomize(model: Any) -> None:
    """Initialises all parameters randomly, also biases and norms; equal shapes in equal order give equal values."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            center = 1.0 if "layernorm.weight" in name else 0.0
            p.copy_(center + 0.2 * torch.randn(p.shape, generator=draw))


@torch.no_grad()
def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, v] of a whole model."""
    s = tokens.shape[1]
    mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    positions = torch.arange(s).expand(tokens.shape)
    return model.eval()(tokens, positions, mask).float()


def args_of(config: Config, *, tp: int, pp: int, **more: Any) -> argparse.Namespace:
    """Those of the arguments stored by Megatron's command line in a checkpoint that the model needs."""
    from megatron.core.transformer.enums import AttnBackend

    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    names += ("seq_length", "max_position_embeddings", "position_embedding_type", "normalization", "norm_epsilon")
    names += ("swiglu", "untie_embeddings_and_output_weights")
    return argparse.Namespace(
        **{name: getattr(config, name) for name in names},
        rotary_base=int(config.rotary_base),
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        add_bias_linear=not config.disable_bias_linear,
        bias_gelu_fusion=not config.swiglu,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        padded_vocab_size=config.padded_vocab_size,
        params_dtype=torch.float32,
        attention_backend=AttnBackend.auto,
        num_experts=None,
        save=Path("somewhere"),
        tokenizer_type="NullTokenizer",
        vocab_size=100,
        **more,
    )
