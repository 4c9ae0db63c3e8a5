"""megatron-core's own GPTModel, made on the CPU in the calling process, for tests."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hal.model.config import Config


def core_model(config: Config, *, tp: int = 1, pp: int = 1) -> Any:
    """The GPTModel (local layers) that `config` describes; this process's share of it. Needs an initialised world."""
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
        )
