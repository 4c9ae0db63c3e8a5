"""The table of Hugging Face model families: one row each, with its fields of config.json and its tensors.

A new family is a new row. Rules of fields are in field_rules.py, layouts of tensors in tensor_layout.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .field_rules import (
    Rule,
    choice,
    constant,
    count,
    dense_first,
    expert_groups,
    fixed,
    linear_biases,
    number,
    old_names,
    required,
    rope,
    shared_experts,
    sparse_layers,
    untied,
    window,
    written,
)
from .tensor_layout import Experts, GateUp, Layout, Qkv, StackedQkv, Transposed, TransposedQkv


@dataclass(frozen=True)
class Family:
    """model_type: that of config.json. architecture: transformers' class. rules: see field_rules.py.

    whole: layouts by our modules outside of the layers. layer: the same within a layer, without its number; their names
    are prefixed by `layers` and the number. A name with its last component (".expert_bias") stands for one tensor.
    ignored: patterns of tensors of old files that are constants. base: their prefix, which files of a model without
    its head lack.
    """

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    whole: dict[str, Layout]
    layer: dict[str, Layout]
    layers: str = "model.layers"
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    base: str = "model."


def _same(name: str) -> Layout:
    return Layout((name,))


_SIZES = (
    required("hidden_size", "hidden_size"),
    required("num_layers", "num_hidden_layers"),
    required("num_attention_heads", "num_attention_heads"),
    required("ffn_hidden_size", "intermediate_size"),
    required("seq_length", "max_position_embeddings"),
    required("max_position_embeddings", "max_position_embeddings"),
    number("init_method_std", "initializer_range", 0.02),
    number("attention_dropout", "attention_dropout", 0.0),
)


def _llama_like(*rules: Rule, epsilon: float = 1e-6, tied: bool = False) -> tuple[Rule, ...]:
    """The rules of the families with RMSNorm, SwiGLU and rotary positions, and those that differ."""
    return (
        *_SIZES,
        fixed(normalization="RMSNorm", swiglu=True, hidden_dropout=0.0),
        constant("hidden_act", "silu"),
        number("norm_epsilon", "rms_norm_eps", epsilon),
        untied(tied),
        *rules,
    )


_GROUPED = (count("num_query_groups", "num_key_value_heads"), count("kv_channels", "head_dim"))
_NO_BIAS = fixed(disable_bias_linear=True)
_QKV_BIAS = fixed(disable_bias_linear=True, add_qkv_bias=True)
_NO_BIAS_FIELD = constant("attention_bias", False, options={"disable_bias_linear": True})
_QK_NORM = fixed(qk_layernorm=True)

_WHOLE: dict[str, Layout] = {
    "embedding.word_embeddings": _same("model.embed_tokens"),
    "decoder.final_layernorm": _same("model.norm"),
    "output_layer": _same("lm_head"),
}
_NORMS: dict[str, Layout] = {
    "input_layernorm": _same("input_layernorm"),
    "pre_mlp_layernorm": _same("post_attention_layernorm"),
}
_ATTENTION: dict[str, Layout] = {
    "self_attention.linear_qkv": Qkv(tuple(f"self_attn.{n}_proj" for n in "qkv")),
    "self_attention.linear_proj": _same("self_attn.o_proj"),
}
_QK_NORMS: dict[str, Layout] = {f"self_attention.{n}_layernorm": _same(f"self_attn.{n}_norm") for n in "qk"}
_LATENT: dict[str, Layout] = {
    "self_attention.linear_q_proj": _same("self_attn.q_proj"),
    "self_attention.linear_q_down_proj": _same("self_attn.q_a_proj"),
    "self_attention.q_layernorm": _same("self_attn.q_a_layernorm"),
    "self_attention.linear_q_up_proj": _same("self_attn.q_b_proj"),
    "self_attention.linear_kv_down_proj": _same("self_attn.kv_a_proj_with_mqa"),
    "self_attention.kv_layernorm": _same("self_attn.kv_a_layernorm"),
    "self_attention.linear_kv_up_proj": _same("self_attn.kv_b_proj"),
    "self_attention.linear_proj": _same("self_attn.o_proj"),
}
_MLP: dict[str, Layout] = {
    "mlp.linear_fc1": GateUp(("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2": _same("mlp.down_proj"),
}
_EXPERTS: dict[str, Layout] = {
    "mlp.router": _same("mlp.gate"),
    "mlp.experts.linear_fc1": Experts(("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj")),
    "mlp.experts.linear_fc2": Experts(("mlp.experts.{e}.down_proj",)),
}
_SHARED: dict[str, Layout] = {
    "mlp.router.expert_bias": _same("mlp.gate.e_score_correction_bias"),
    "mlp.shared_experts.linear_fc1": GateUp(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")),
    "mlp.shared_experts.linear_fc2": _same("mlp.shared_experts.down_proj"),
}
_DENSE = {**_NORMS, **_ATTENTION, **_MLP}

_GELU: dict[str, dict[str, Any]] = {
    name: {"gelu_approximate": kind}
    for name, kind in {"gelu_new": "tanh", "gelu": "none", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}.items()
}

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        required("hidden_size", "n_embd"),
        required("num_layers", "n_layer"),
        required("num_attention_heads", "n_head"),
        count("ffn_hidden_size", "n_inner"),
        required("seq_length", "n_positions"),
        required("max_position_embeddings", "n_positions"),
        number("norm_epsilon", "layer_norm_epsilon", 1e-5),
        number("init_method_std", "initializer_range", 0.02),
        number("attention_dropout", "attn_pdrop", 0.1),
        number("hidden_dropout", "embd_pdrop", 0.1),
        number("hidden_dropout", "resid_pdrop", 0.1),
        choice("activation_function", _GELU, "gelu_new"),
        constant("scale_attn_weights", True),
        constant("scale_attn_by_inverse_layer_idx", False),
        constant("add_cross_attention", False),
        untied(True),
    ),
    {
        "embedding.word_embeddings": _same("transformer.wte"),
        "embedding.position_embeddings": _same("transformer.wpe"),
        "decoder.final_layernorm": _same("transformer.ln_f"),
        "output_layer": _same("lm_head"),
    },
    {
        "input_layernorm": _same("ln_1"),
        "self_attention.linear_qkv": TransposedQkv(("attn.c_attn",)),
        "self_attention.linear_proj": Transposed(("attn.c_proj",)),
        "pre_mlp_layernorm": _same("ln_2"),
        "mlp.linear_fc1": Transposed(("mlp.c_fc",)),
        "mlp.linear_fc2": Transposed(("mlp.c_proj",)),
    },
    layers="transformer.h",
    ignored=(r".*\.attn\.(masked_)?bias",),
    base="transformer.",
)
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _llama_like(*_GROUPED, linear_biases(), rope("llama3")),
    _WHOLE,
    _DENSE,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    _llama_like(*_GROUPED, _NO_BIAS, rope(), window()),
    _WHOLE,
    _DENSE,
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    _llama_like(*_GROUPED, _QKV_BIAS, rope(), window(switch=True)),
    _WHOLE,
    _DENSE,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _llama_like(*_GROUPED, _NO_BIAS_FIELD, _QK_NORM, rope(), window(switch=True)),
    _WHOLE,
    {**_DENSE, **_QK_NORMS},
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _llama_like(
        count("num_query_groups", "num_key_value_heads"),
        _NO_BIAS,
        constant("resid_pdrop", 0.0),
        constant("embd_pdrop", 0.0),
        rope(partial=True),
        window(),
        epsilon=1e-5,
    ),
    _WHOLE,
    {
        **_NORMS,
        "self_attention.linear_qkv": StackedQkv(("self_attn.qkv_proj",)),
        "self_attention.linear_proj": _same("self_attn.o_proj"),
        "mlp.linear_fc1": _same("mlp.gate_up_proj"),
        "mlp.linear_fc2": _same("mlp.down_proj"),
    },
)
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    (
        *_SIZES,
        number("norm_epsilon", "layer_norm_eps", 1e-5),
        number("hidden_dropout", "hidden_dropout", 0.0),
        choice("hidden_act", _GELU, "gelu"),
        choice("use_parallel_residual", {n: {"use_parallel_residual": n} for n in (True, False)}, True),
        constant("attention_bias", True),
        untied(False),
        old_names(rope(partial=True, percent=0.25), rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct"),
    ),
    {
        "embedding.word_embeddings": _same("gpt_neox.embed_in"),
        "decoder.final_layernorm": _same("gpt_neox.final_layer_norm"),
        "output_layer": _same("embed_out"),
    },
    {
        **_NORMS,
        # The rows are grouped by head, as Megatron's are with as many key/value heads as query heads.
        "self_attention.linear_qkv": _same("attention.query_key_value"),
        "self_attention.linear_proj": _same("attention.dense"),
        "mlp.linear_fc1": _same("mlp.dense_h_to_4h"),
        "mlp.linear_fc2": _same("mlp.dense_4h_to_h"),
    },
    layers="gpt_neox.layers",
    ignored=(r".*\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
    base="gpt_neox.",
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _llama_like(
        *_GROUPED,
        _NO_BIAS,
        required("num_experts", "num_local_experts"),
        count("moe_router_topk", "num_experts_per_tok", 2),
        constant("router_jitter_noise", 0.0),
        rope(base=1e6),
        window(),
        epsilon=1e-5,
    ),
    _WHOLE,
    {
        **_NORMS,
        **_ATTENTION,
        "mlp.router": _same("block_sparse_moe.gate"),
        "mlp.experts.linear_fc1": Experts(("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3")),
        "mlp.experts.linear_fc2": Experts(("block_sparse_moe.experts.{e}.w2",)),
    },
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _llama_like(
        *_GROUPED,
        _NO_BIAS_FIELD,
        _QK_NORM,
        old_names(required("num_experts", "num_experts"), num_experts="num_local_experts"),
        count("moe_router_topk", "num_experts_per_tok", 8),
        required("moe_ffn_hidden_size", "moe_intermediate_size"),
        # Probabilities that are normalised after the choice are a softmax over the chosen experts.
        choice("norm_topk_prob", {n: {"moe_router_pre_softmax": not n} for n in (False, True)}, False),
        sparse_layers(),
        rope(),
        window(switch=True),
    ),
    _WHOLE,
    {**_DENSE, **_QK_NORMS, **_EXPERTS},
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _llama_like(
        _NO_BIAS_FIELD,
        written("num_key_value_heads", "num_attention_heads"),
        fixed(multi_latent_attention=True, qk_layernorm=True),
        fixed(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        count("q_lora_rank", "q_lora_rank"),
        required("kv_lora_rank", "kv_lora_rank"),
        required("qk_head_dim", "qk_nope_head_dim"),
        required("qk_pos_emb_head_dim", "qk_rope_head_dim"),
        required("v_head_dim", "v_head_dim"),
        constant("rope_interleave", True),
        old_names(required("num_experts", "n_routed_experts"), n_routed_experts="num_local_experts"),
        count("moe_router_topk", "num_experts_per_tok", 8),
        required("moe_ffn_hidden_size", "moe_intermediate_size"),
        number("moe_router_topk_scaling_factor", "routed_scaling_factor", 2.5),
        constant("norm_topk_prob", True),
        expert_groups(),
        shared_experts(),
        dense_first(),
        rope("yarn"),
    ),
    _WHOLE,
    {**_NORMS, **_LATENT, **_MLP, **_EXPERTS, **_SHARED},
)
FAMILIES = {
    f.model_type: f for f in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GPT_NEOX, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3)
}
"""All families by model_type. A model is written as the first that can express it."""
