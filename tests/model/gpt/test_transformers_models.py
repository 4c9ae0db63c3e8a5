"""Mixtral, Qwen3-MoE and DeepSeek-V3 of transformers, with random weights: equal logits and equal gradients."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from model_options import DEEPSEEK_OPTIONS, LATENT_OPTIONS
from torch import Tensor

from hal.model.apps.convert.qkv_layout import group_qkv
from hal.model.config.schema import Config
from hal.model.gpt.model import GPT

VOCABULARY, LAYERS, HIDDEN, HEADS, GROUPS = 96, 3, 32, 4, 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
}
OURS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_vocab_size_to": VOCABULARY,
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "seq_length": 32,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "ffn_hidden_size": 48,
    "num_experts": 8,
}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (
        "mixtral",
        "Mixtral",
        {
            "num_key_value_heads": GROUPS,
            "num_local_experts": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {"num_query_groups": GROUPS, "rotary_base": 1e6},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        "Qwen3Moe",
        {
            "num_key_value_heads": GROUPS,
            "head_dim": 12,
            "num_experts": 8,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {
            "num_query_groups": GROUPS,
            "kv_channels": 12,
            "qk_layernorm": True,
            "moe_ffn_hidden_size": 24,
            "moe_layer_freq": "[1,0,1]",
            "moe_router_pre_softmax": True,  # its norm_topk_prob is False
            "rotary_base": 1e6,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        "DeepseekV3",
        {
            "num_key_value_heads": HEADS,
            "num_experts_per_tok": 4,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            "q_lora_rank": LATENT_OPTIONS["q_lora_rank"],
            "kv_lora_rank": LATENT_OPTIONS["kv_lora_rank"],
            "qk_nope_head_dim": LATENT_OPTIONS["qk_head_dim"],
            "qk_rope_head_dim": LATENT_OPTIONS["qk_pos_emb_head_dim"],
            "v_head_dim": LATENT_OPTIONS["v_head_dim"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
        {
            **LATENT_OPTIONS,
            **DEEPSEEK_OPTIONS,
            "moe_layer_freq": "[0,1,1]",
            "moe_ffn_hidden_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
}
NAMES = {
    "model.embed_tokens.": "embedding.word_embeddings.",
    "model.norm.": "decoder.final_layernorm.",
    "lm_head.": "output_layer.",
    "model.layers.": "decoder.layers.",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.gate.weight": "mlp.router.weight",
    "shared_experts.down_proj": "shared_experts.linear_fc2",
    "mlp.experts.gate_up_proj": "mlp.experts.linear_fc1.weight",
    "mlp.experts.down_proj": "mlp.experts.linear_fc2.weight",
    "mlp.down_proj": "mlp.linear_fc2",
}
"""Parts of transformers' names and of HAL's, in the order in which they are replaced."""


def ours(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under HAL's names and in its order of rows; weights and gradients alike."""
    tensors, parts = dict(theirs), {}
    for name in list(theirs):
        prefix, _, last = name.rpartition(".")[0].rpartition(".")
        if last == "q_proj":
            q, k, v = (tensors.pop(f"{prefix}.{x}_proj.weight") for x in "qkv")
            layer = prefix.removesuffix(".self_attn").removeprefix("model.")
            parts[f"decoder.{layer}.self_attention.linear_qkv.weight"] = group_qkv(q, k, v, GROUPS)
        if last == "gate_proj":
            gated = torch.cat([tensors.pop(f"{prefix}.{x}_proj.weight") for x in ("gate", "up")])
            tensors[f"{prefix}.linear_fc1.weight"] = gated
    for name, tensor in tensors.items():
        for old, new in NAMES.items():
            name = re.sub(re.escape(old), new, name)
        parts[name] = tensor
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_gradients(kind: str, cpu_ref: Any) -> None:
    module, prefix, options, given = MODELS[kind]
    transformers = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    configuration = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    theirs = getattr(transformers, f"{prefix}ForCausalLM")(
        getattr(configuration, f"{prefix}Config")(**{**COMMON, **options})
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + ("norm" in name))
        for name, b in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(torch.randn(b.shape, generator=generator) * 0.2)
    mine = GPT(Config(**{**OURS, **given}), torch.device("cpu"))
    mine.load_state_dict(ours(theirs.state_dict()))
    tokens = torch.randint(0, VOCABULARY, (2, 32), generator=generator)
    weights = torch.randn(2, 32, VOCABULARY, generator=generator)
    right = theirs(tokens).logits
    (right * weights).mean().backward()
    logits = mine(tokens).transpose(0, 1)
    (logits * weights).mean().backward()
    torch.testing.assert_close(logits, right, rtol=2e-5, atol=2e-5 * right.abs().max().item())
    gradients = ours({name: p.grad for name, p in theirs.named_parameters()})
    assert gradients.keys() == {name for name, _ in mine.named_parameters()}
    for name, p in mine.named_parameters():
        largest = gradients[name].abs().max().item()
        assert largest > 0.0, name
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=2e-5 * largest, msg=name)
