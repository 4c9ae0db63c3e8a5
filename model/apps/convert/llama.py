"""Hugging Face Llama: q, k, v, gate and up are separate matrices, rotary pairs are (i, i + d/2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...config.schema import Config
from ...gpt.model import OUTPUT_LAYER, WORD_EMBEDDING
from .hf_config import Fields, ends, unless, unsupported_options
from .qkv_layout import group_qkv, pairs_to_halves, ungroup_qkv
from .weights import ConversionError, Weights, require

_LINEAR = [
    *(f"self_attn.{n}_proj" for n in "qkvo"),
    *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
]


# Fields that variants of Llama add to config.json, and the values at which they have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1),
    "clip_qkv": (None,),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "no_rope_layers": (None, []),
    "quantization_config": (None,),
}


def _only_neutral(c: Fields) -> None:
    """Raises ConversionError for fields that change the results and have no counterpart in HAL's model."""
    # Old files have rope_scaling, whose kind was first called "type"; new ones have rope_parameters.
    for rope in (c.part("rope_parameters"), c.part("rope_scaling")):
        for name in ("rope_type", "type"):
            kind = rope.get(name, None)
            require(
                kind in (None, "default"), f"rotary positions scaled by {kind!r} have no counterpart in HAL's model"
            )
        for name in ("factor", "partial_rotary_factor"):
            rope.only(name, (None, 1), None)
    for name, values in _NEUTRAL.items():
        c.only(name, values, None)
    if c.get("sliding_window", None) is not None and c.flag("use_sliding_window", True):
        window, length = c.count("sliding_window"), c.count("max_position_embeddings")
        require(window >= length, f"attention in a sliding window of {window} tokens is not converted")


def read(c: Fields, tensors: dict[str, Tensor]) -> Weights:
    c.only("hidden_act", ("silu",), "silu")
    _only_neutral(c)
    bias = c.flag("attention_bias", False)
    require(
        bias == c.flag("mlp_bias", False),
        "biases only in attention or only in the MLP have no counterpart in HAL's model",
    )
    h, heads, layers = c.count("hidden_size"), c.count("num_attention_heads"), c.count("num_hidden_layers")
    groups, tied = c.count("num_key_value_heads", heads), c.flag("tie_word_embeddings", False)
    options = {
        "num_layers": layers,
        "hidden_size": h,
        "ffn_hidden_size": c.count("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": c.count("head_dim", h // heads),
        "seq_length": c.count("max_position_embeddings"),
        "max_position_embeddings": c.count("max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": float(c.part("rope_parameters").number("rope_theta", c.number("rope_theta", 10000.0))),
        "normalization": "RMSNorm",
        "norm_epsilon": c.number("rms_norm_eps", 1e-6),
        "swiglu": True,
        "disable_bias_linear": not bias,
        "untie_embeddings_and_output_weights": not tied,
        "attention_dropout": c.number("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": c.number("initializer_range", 0.02),
    }
    converted = {
        WORD_EMBEDDING: tensors.pop("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": tensors.pop("model.norm.weight"),
    }
    head_weight = tensors.pop("lm_head.weight", None)
    if not tied:
        if head_weight is None:
            raise ConversionError("the output weights are not tied, but there is no lm_head.weight")
        converted[OUTPUT_LAYER] = head_weight
    for layer in range(layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        tensors.pop(f"{theirs}.self_attn.rotary_emb.inv_freq", None)  # a constant in files of old versions
        for part in ("weight", "bias") if bias else ("weight",):
            t = {name: tensors.pop(f"{theirs}.{name}.{part}") for name in _LINEAR}
            q, k, v = (t[f"self_attn.{n}_proj"] for n in "qkv")
            converted[f"{ours}.self_attention.linear_qkv.{part}"] = group_qkv(q, k, v, groups)
            converted[f"{ours}.self_attention.linear_proj.{part}"] = t["self_attn.o_proj"]
            converted[f"{ours}.mlp.linear_fc1.{part}"] = torch.cat([t["mlp.gate_proj"], t["mlp.up_proj"]])
            converted[f"{ours}.mlp.linear_fc2.{part}"] = t["mlp.down_proj"]
        converted[f"{ours}.input_layernorm.weight"] = tensors.pop(f"{theirs}.input_layernorm.weight")
        converted[f"{ours}.pre_mlp_layernorm.weight"] = tensors.pop(f"{theirs}.post_attention_layernorm.weight")
    return Weights(options, converted)


def reasons_against(c: Config) -> list[str]:
    return [
        *unsupported_options(c),
        *unless(c.position_embedding_type == "rope", f"--position-embedding-type {c.position_embedding_type}"),
        *unless(c.rotary_percent == 1.0, f"--rotary-percent {c.rotary_percent}"),
        *unless(c.normalization == "RMSNorm", f"--normalization {c.normalization}"),
        *unless(c.swiglu, "an MLP other than --swiglu"),
        *unless(not (c.add_qkv_bias and c.disable_bias_linear), "--add-qkv-bias"),
    ]


def write(c: Config, weights: Weights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    x, d = weights.tensors, c.kv_channels
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": weights.vocabulary,
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.ffn_hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_query_groups,
        "head_dim": d,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        # Both are written: transformers 5 reads rope_parameters, and older versions read rope_theta.
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
        "rope_theta": c.rotary_base,
        "attention_bias": not c.disable_bias_linear,
        "mlp_bias": not c.disable_bias_linear,
        "attention_dropout": c.attention_dropout,
        "initializer_range": c.init_method_std,
        "tie_word_embeddings": not c.untie_embeddings_and_output_weights,
        **ends(weights),
    }
    converted = {
        "model.embed_tokens.weight": x[WORD_EMBEDDING],
        "model.norm.weight": x["decoder.final_layernorm.weight"],
    }
    if OUTPUT_LAYER in x:
        converted["lm_head.weight"] = x[OUTPUT_LAYER]
    for layer in range(c.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        for part in ("weight",) if c.disable_bias_linear else ("weight", "bias"):
            q, k, v = ungroup_qkv(x[f"{ours}.self_attention.linear_qkv.{part}"], c.num_query_groups, d)
            if c.rotary_interleaved:
                q, k = (pairs_to_halves(t, d) for t in (q, k))
            gate, up = x[f"{ours}.mlp.linear_fc1.{part}"].chunk(2)
            rows = {
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
            }
            rows["self_attn.o_proj"] = x[f"{ours}.self_attention.linear_proj.{part}"]
            rows["mlp.down_proj"] = x[f"{ours}.mlp.linear_fc2.{part}"]
            converted.update({f"{theirs}.{name}.{part}": t for name, t in rows.items()})
        converted[f"{theirs}.input_layernorm.weight"] = x[f"{ours}.input_layernorm.weight"]
        converted[f"{theirs}.post_attention_layernorm.weight"] = x[f"{ours}.pre_mlp_layernorm.weight"]
    return fields, converted
