"""Options of a LLaMA-like model of any size, and a small trained-model object, for tests of different folders."""

from __future__ import annotations

from typing import Any

import torch

from hal.model.config.schema import Config
from hal.model.data.tokenizers.tokenizer import ByteTokenizer
from hal.model.gpt.model import GPT
from hal.model.inference.engine import Engine
from hal.model.inference.load import Pretrained

LLAMA_OPTIONS: dict[str, Any] = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}

DEEPSEEK_OPTIONS: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.02,
    "moe_shared_expert_intermediate_size": 16,
}
"""Grouped experts and a shared one; the router uses sigmoids and a bias that balances the experts."""

LATENT_OPTIONS: dict[str, Any] = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale_all_dim": 0.7,
}
"""Latent attention with YaRN, every size different."""

GATED_DELTA_OPTIONS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "normalization": "RMSNorm",
    "swiglu": True,
    "num_query_groups": 2,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "2",
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Linear attention in every other layer from the first on; the others' attention has output gates."""

ROPE_OPTIONS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "num_query_groups": 2,
}
SCALED_OPTIONS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "geglu": True,
    "disable_bias_linear": True,
    "num_query_groups": 2,
    "apply_layernorm_1p": True,
    "use_sandwich_norm": True,
    "pre_tokens": 4,
    "window_attn_skip_freq": "2",
    "softmax_scale": 0.4,
    "attn_logit_softcapping": 1.5,
    "output_logit_softcapping": 3.0,
    "embedding_multiplier_scale": 5.0,
    "residual_multiplier": 0.7,
    "output_multiplier_scale": 0.9,
    "no_rope_freq": "3",
}
"""What Gemma 2, Granite and SmolLM3 add to a model, every factor different from 1."""

CACHED_KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "no-flash-attn": {"use_flash_attn": False},
    "llama": ROPE_OPTIONS,
    "window-that-lags": {"pre_tokens": 6, "next_tokens": -1, "use_flash_attn": False},
    "bnsd": {"shape_order": "BNSD"},
    "latent": LATENT_OPTIONS,
    "scaled": SCALED_OPTIONS,
    "gated-delta": GATED_DELTA_OPTIONS,
}
"""Kinds of models whose attention reads a key/value cache in different ways."""


def sizes(layers: int, hidden: int, heads: int, length: int) -> dict[str, Any]:
    """The options of a model's size."""
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": length}


def byte_model(length: int) -> Pretrained:
    """A model of bytes with contexts of `length` tokens and random weights, on the active backend's host memory."""
    config = Config(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=length, init_method_std=0.3)
    config.set_vocabulary(257)
    engine = Engine(GPT(config, torch.device("cpu")).requires_grad_(False), 257)
    return Pretrained(config, engine, ByteTokenizer(), 0, {})
