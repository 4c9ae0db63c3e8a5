"""A row of the table of families, and the rules of fields that many rows share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .field_rules import (
    Rule,
    attention_biases,
    constant,
    count,
    fixed,
    number,
    required,
    scaled_embedding,
    untied,
)
from .rotary_rules import rope
from .tensor_layout import Layout
from .tensor_names import DENSE, WHOLE


@dataclass(frozen=True)
class Family:
    """model_type: that of config.json. architecture: transformers' class. rules: see field_rules.py.

    whole: layouts by our modules outside of the layers; default: Llama's. layer: the same within a layer, without its
    number; their names are prefixed by `layers` and the number. A name with its last component (".expert_bias") stands
    for one tensor. ignored: patterns of tensors of old files that are constants. base: their prefix, which files of a
    model without its head lack.
    """

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    whole: dict[str, Layout] = field(default_factory=lambda: WHOLE)
    layer: dict[str, Layout] = field(default_factory=lambda: DENSE)
    layers: str = "model.layers"
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    base: str = "model."


SIZES = (
    required("hidden_size", "hidden_size"),
    required("num_layers", "num_hidden_layers"),
    required("num_attention_heads", "num_attention_heads"),
    required("ffn_hidden_size", "intermediate_size"),
    required("seq_length", "max_position_embeddings"),
    required("max_position_embeddings", "max_position_embeddings"),
    number("init_method_std", "initializer_range", 0.02),
    number("attention_dropout", "attention_dropout", 0.0),
)
SWIGLU = (fixed(swiglu=True), constant("hidden_act", "silu"))
SQUARED_RELU = (fixed(squared_relu=True), constant("hidden_act", "relu2"))


def llama_like(
    *rules: Rule, epsilon: float = 1e-6, tied: bool = False, activation: tuple[Rule, ...] = SWIGLU
) -> tuple[Rule, ...]:
    """Rules of the families with RMSNorm and rotary positions, and those that differ."""
    return (
        *SIZES,
        fixed(normalization="RMSNorm", hidden_dropout=0.0),
        number("norm_epsilon", "rms_norm_eps", epsilon),
        untied(tied),
        *activation,
        *rules,
    )


GROUPED = (count("num_query_groups", "num_key_value_heads"), count("kv_channels", "head_dim"))
NO_BIAS = fixed(disable_bias_linear=True)
QKV_BIAS = fixed(disable_bias_linear=True, add_qkv_bias=True)
QK_NORM = fixed(qk_layernorm=True)

GELU: dict[str, dict[str, Any]] = {
    name: {"gelu_approximate": kind}
    for name, kind in {"gelu_new": "tanh", "gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}.items()
}
GELU_TANH = {"gelu_pytorch_tanh": GELU["gelu_pytorch_tanh"], **GELU}
"""The same, with another name for the approximation when it is written."""

GEMMA_RULES = (
    attention_biases(),
    fixed(apply_layernorm_1p=True),
    scaled_embedding(),
    constant("use_bidirectional_attention", None),
    rope(),
)
