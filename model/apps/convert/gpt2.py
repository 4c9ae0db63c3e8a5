"""Hugging Face GPT-2: weights are [in, out], and q, k, v are three blocks of columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...config.schema import Config
from ...gpt.model import OUTPUT_LAYER, POSITION_EMBEDDING, WORD_EMBEDDING
from .hf_config import Fields, ends, unless, unsupported_options
from .qkv_layout import group_qkv, ungroup_qkv
from .weights import ConversionError, Weights

_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "none"}


def read(c: Fields, tensors: dict[str, Tensor]) -> Weights:
    c.only("activation_function", _GELU, "gelu_new")
    c.only("scale_attn_weights", (True,), True)
    c.only("scale_attn_by_inverse_layer_idx", (False,), False)
    c.only("add_cross_attention", (False,), False)
    h, heads = c.count("n_embd"), c.count("n_head")
    tied = c.flag("tie_word_embeddings", True)
    options = {
        "num_layers": c.count("n_layer"),
        "hidden_size": h,
        "ffn_hidden_size": c.count("n_inner", 4 * h),
        "num_attention_heads": heads,
        "seq_length": c.count("n_positions"),
        "max_position_embeddings": c.count("n_positions"),
        "norm_epsilon": c.number("layer_norm_epsilon", 1e-5),
        "gelu_approximate": _GELU[c.get("activation_function", "gelu_new")],
        "untie_embeddings_and_output_weights": not tied,
        "attention_dropout": c.number("attn_pdrop", 0.1),
        "hidden_dropout": c.number("resid_pdrop", 0.1),
        "init_method_std": c.number("initializer_range", 0.02),
    }
    prefix = "" if "wte.weight" in tensors else "transformer."

    def take(name: str) -> Tensor:
        return tensors.pop(prefix + name)

    converted = {WORD_EMBEDDING: take("wte.weight"), POSITION_EMBEDDING: take("wpe.weight")}
    head_weight = tensors.pop("lm_head.weight", None)
    if not tied:
        if head_weight is None:
            raise ConversionError("the output weights are not tied, but there is no lm_head.weight")
        converted[OUTPUT_LAYER] = head_weight
    for layer in range(options["num_layers"]):
        ours, theirs = f"decoder.layers.{layer}", f"h.{layer}"
        for mask in ("attn.bias", "attn.masked_bias"):  # constants in files of old versions
            tensors.pop(f"{prefix}{theirs}.{mask}", None)
        for part in ("weight", "bias"):
            q, k, v = _transposed(take(f"{theirs}.attn.c_attn.{part}")).chunk(3)
            converted[f"{ours}.self_attention.linear_qkv.{part}"] = group_qkv(q, k, v, heads)
            converted[f"{ours}.input_layernorm.{part}"] = take(f"{theirs}.ln_1.{part}")
            converted[f"{ours}.pre_mlp_layernorm.{part}"] = take(f"{theirs}.ln_2.{part}")
            for a, b in _GPT2_LINEAR.items():
                converted[f"{ours}.{a}.{part}"] = _transposed(take(f"{theirs}.{b}.{part}"))
    for part in ("weight", "bias"):
        converted[f"decoder.final_layernorm.{part}"] = take(f"ln_f.{part}")
    return Weights(options, converted)


def _transposed(x: Tensor) -> Tensor:
    """Transposes a weight ([in, out] <-> [out, in]); a bias [out] is returned unchanged."""
    return x.t()


_GPT2_LINEAR = {
    "self_attention.linear_proj": "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def reasons_against(c: Config) -> list[str]:
    return [
        *unsupported_options(c),
        *unless(
            c.position_embedding_type == "learned_absolute", f"--position-embedding-type {c.position_embedding_type}"
        ),
        *unless(c.normalization == "LayerNorm", f"--normalization {c.normalization}"),
        *unless(not (c.swiglu or c.geglu), "a gated MLP"),
        *unless(c.gelu_approximate != "fast", "--gelu-approximate fast"),
        *unless(not c.disable_bias_linear, "--disable-bias-linear"),
        *unless(c.num_query_groups == c.num_attention_heads, "--num-query-groups"),
        *unless(c.kv_channels * c.num_attention_heads == c.hidden_size, f"--kv-channels {c.kv_channels}"),
    ]


def write(c: Config, weights: Weights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    x = weights.tensors
    fields = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": weights.vocabulary,
        "n_positions": c.max_position_embeddings,
        "n_embd": c.hidden_size,
        "n_layer": c.num_layers,
        "n_head": c.num_attention_heads,
        "n_inner": c.ffn_hidden_size,
        "activation_function": "gelu_new" if c.gelu_approximate == "tanh" else "gelu",
        "layer_norm_epsilon": c.norm_epsilon,
        "attn_pdrop": c.attention_dropout,
        "resid_pdrop": c.hidden_dropout,
        "embd_pdrop": c.hidden_dropout,
        "initializer_range": c.init_method_std,
        "tie_word_embeddings": not c.untie_embeddings_and_output_weights,
        **ends(weights),
    }
    converted = {"transformer.wte.weight": x[WORD_EMBEDDING], "transformer.wpe.weight": x[POSITION_EMBEDDING]}
    if OUTPUT_LAYER in x:
        converted["lm_head.weight"] = x[OUTPUT_LAYER]
    for layer in range(c.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        for part in ("weight", "bias"):
            qkv = ungroup_qkv(x[f"{ours}.self_attention.linear_qkv.{part}"], c.num_attention_heads, c.kv_channels)
            converted[f"{theirs}.attn.c_attn.{part}"] = _transposed(torch.cat(qkv))
            converted[f"{theirs}.ln_1.{part}"] = x[f"{ours}.input_layernorm.{part}"]
            converted[f"{theirs}.ln_2.{part}"] = x[f"{ours}.pre_mlp_layernorm.{part}"]
            for a, b in _GPT2_LINEAR.items():
                converted[f"{theirs}.{b}.{part}"] = _transposed(x[f"{ours}.{a}.{part}"])
    for part in ("weight", "bias"):
        converted[f"transformer.ln_f.{part}"] = x[f"decoder.final_layernorm.{part}"]
    return fields, converted
