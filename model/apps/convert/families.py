"""The table of Hugging Face model families: one row each, with its fields of config.json and its tensors.

A new family is a new row. Rows and shared rules are described in family.py, rules of fields in field_rules.py, layouts
of tensors in tensor_layout.py and the names that many families share in tensor_names.py.
"""

from __future__ import annotations

from .family import (
    GELU,
    GELU_TANH,
    GEMMA_RULES,
    GROUPED,
    NO_BIAS,
    QK_NORM,
    QKV_BIAS,
    SIZES,
    SQUARED_RELU,
    SWIGLU,
    Family,
    llama_like,
)
from .field_rules import (
    Rule,
    attention_biases,
    behind,
    cap,
    choice,
    constant,
    count,
    dense_first,
    every_other,
    expert_groups,
    fixed,
    linear_biases,
    no_rope,
    normalised_topk,
    number,
    old_names,
    power,
    required,
    shared_experts,
    sparse_layers,
    unrotated,
    untied,
    window,
    written,
)
from .rotary_rules import rope
from .tensor_layout import Experts, Layout, StackedQkv, Transposed, TransposedQkv
from .tensor_names import (
    ATTENTION,
    DENSE,
    EXPERTS,
    LATENT,
    MLP,
    NORMS,
    PLAIN_MLP,
    QK_NORMS,
    SHARED,
    same,
)

_GPT2: tuple[Rule, ...] = (
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
    constant("scale_attn_weights", True),
    constant("add_cross_attention", False),
    untied(True),
)
_GPT2_WHOLE: dict[str, Layout] = {
    "embedding.word_embeddings": same("transformer.wte"),
    "embedding.position_embeddings": same("transformer.wpe"),
    "decoder.final_layernorm": same("transformer.ln_f"),
    "output_layer": same("lm_head"),
}
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        *_GPT2,
        choice("activation_function", GELU, "gelu_new"),
        constant("scale_attn_by_inverse_layer_idx", False),
    ),
    whole=_GPT2_WHOLE,
    layer={
        "input_layernorm": same("ln_1"),
        "self_attention.linear_qkv": TransposedQkv(("attn.c_attn",)),
        "self_attention.linear_proj": Transposed(("attn.c_proj",)),
        "pre_mlp_layernorm": same("ln_2"),
        "mlp.linear_fc1": Transposed(("mlp.c_fc",)),
        "mlp.linear_fc2": Transposed(("mlp.c_proj",)),
    },
    layers="transformer.h",
    ignored=(r".*\.attn\.(masked_)?bias",),
    base="transformer.",
)
GPT_BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    (
        *_GPT2,
        choice("activation_function", GELU_TANH, "gelu_pytorch_tanh"),
        choice("multi_query", {True: {"num_query_groups": 1}, False: {}}, True),
    ),
    whole=_GPT2_WHOLE,
    layer={
        "input_layernorm": same("ln_1"),
        # Megatron's order of rows, with one key/value head for all queries and with one for each.
        "self_attention.linear_qkv": same("attn.c_attn"),
        "self_attention.linear_proj": same("attn.c_proj"),
        "pre_mlp_layernorm": same("ln_2"),
        "mlp.linear_fc1": same("mlp.c_fc"),
        "mlp.linear_fc2": same("mlp.c_proj"),
    },
    layers="transformer.h",
    ignored=(r".*\.attn\.(masked_)?bias",),
    base="transformer.",
)
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    llama_like(*GROUPED, linear_biases(), rope()),
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    llama_like(*GROUPED, NO_BIAS, rope(), window()),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    llama_like(*GROUPED, QKV_BIAS, rope(), window(behind, switch=True)),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    llama_like(*GROUPED, attention_biases(), QK_NORM, rope(), window(behind, switch=True)),
    layer={**DENSE, **QK_NORMS},
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    llama_like(
        count("num_query_groups", "num_key_value_heads"),
        NO_BIAS,
        constant("resid_pdrop", 0.0),
        constant("embd_pdrop", 0.0),
        # Old files call this scaling by other names.
        rope("longrope", partial=True, names={"su": "longrope", "yarn": "longrope"}),
        window(),
        epsilon=1e-5,
    ),
    layer={
        **NORMS,
        "self_attention.linear_qkv": StackedQkv(("self_attn.qkv_proj",)),
        "self_attention.linear_proj": same("self_attn.o_proj"),
        "mlp.linear_fc1": same("mlp.gate_up_proj"),
        "mlp.linear_fc2": same("mlp.down_proj"),
    },
)
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    (
        *SIZES,
        number("norm_epsilon", "layer_norm_eps", 1e-5),
        number("hidden_dropout", "hidden_dropout", 0.0),
        choice("hidden_act", GELU, "gelu"),
        choice("use_parallel_residual", {n: {"use_parallel_residual": n} for n in (True, False)}, True),
        attention_biases(True, mlp=True),
        untied(False),
        old_names(rope(partial=True, percent=0.25), rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct"),
    ),
    {
        "embedding.word_embeddings": same("gpt_neox.embed_in"),
        "decoder.final_layernorm": same("gpt_neox.final_layer_norm"),
        "output_layer": same("embed_out"),
    },
    {
        **NORMS,
        # The rows are grouped by head, as Megatron's are with as many key/value heads as query heads.
        "self_attention.linear_qkv": same("attention.query_key_value"),
        "self_attention.linear_proj": same("attention.dense"),
        "mlp.linear_fc1": same("mlp.dense_h_to_4h"),
        "mlp.linear_fc2": same("mlp.dense_4h_to_h"),
    },
    layers="gpt_neox.layers",
    ignored=(r".*\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
    base="gpt_neox.",
)
_TANH_ONLY = dict.fromkeys(("gelu_pytorch_tanh", "gelu"), GELU["gelu_pytorch_tanh"])
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    llama_like(
        count("num_query_groups", "num_key_value_heads"),
        count("kv_channels", "head_dim", 256),
        *GEMMA_RULES,
        tied=True,
        # Old files have "gelu" and mean the approximation.
        activation=(fixed(geglu=True), choice("hidden_act", _TANH_ONLY, "gelu_pytorch_tanh")),
    ),
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    llama_like(
        count("num_query_groups", "num_key_value_heads", 4),
        count("kv_channels", "head_dim", 256),
        *GEMMA_RULES,
        fixed(use_sandwich_norm=True),
        power("softmax_scale", "query_pre_attn_scalar", -0.5, 256),
        cap("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        cap("output_logit_softcapping", "final_logit_softcapping", 30.0),
        window(every_other, default=4096),
        tied=True,
        # Unlike in Gemma, "gelu" is exact: transformers takes this field literally.
        activation=(fixed(geglu=True), choice("hidden_activation", GELU_TANH, "gelu_pytorch_tanh")),
    ),
    layer={
        "input_layernorm": same("input_layernorm"),
        "post_attn_norm": same("post_attention_layernorm"),
        "pre_mlp_layernorm": same("pre_feedforward_layernorm"),
        "post_mlp_layernorm": same("post_feedforward_layernorm"),
        **ATTENTION,
        **MLP,
    },
)
GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    llama_like(
        *GROUPED,
        linear_biases(),
        number("embedding_multiplier_scale", "embedding_multiplier", 1.0),
        number("residual_multiplier", "residual_multiplier", 1.0),
        power("softmax_scale", "attention_multiplier", 1.0, 1.0),
        power("output_multiplier_scale", "logits_scaling", -1.0, 1.0),
        rope(),
    ),
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    llama_like(
        count("num_query_groups", "num_key_value_heads", 4),
        count("kv_channels", "head_dim"),
        linear_biases(),
        no_rope(),
        rope(base=2e6),
        window(unrotated, switch=True),
        tied=True,
    ),
)
ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    llama_like(*GROUPED, linear_biases(), rope(), epsilon=1e-5, activation=SQUARED_RELU),
    layer={**NORMS, **ATTENTION, **PLAIN_MLP},
)
NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    (
        *SIZES,
        *GROUPED,
        *SQUARED_RELU,
        fixed(apply_layernorm_1p=True, hidden_dropout=0.0),
        number("norm_epsilon", "norm_eps", 1e-5),
        linear_biases(),
        untied(False),
        rope(partial=True, percent=0.5),
    ),
    layer={**NORMS, **ATTENTION, **PLAIN_MLP},
)
STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    (
        *SIZES,
        *SWIGLU,
        count("num_query_groups", "num_key_value_heads"),
        number("norm_epsilon", "layer_norm_eps", 1e-5),
        number("hidden_dropout", "hidden_dropout", 0.0),
        fixed(disable_bias_linear=True),
        choice("use_qkv_bias", {n: {"add_qkv_bias": n} for n in (False, True)}, False),
        constant("qk_layernorm", False),
        constant("use_parallel_residual", False),
        untied(False),
        rope(partial=True, percent=0.25),
    ),
)
STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    (
        *SIZES,
        count("num_query_groups", "num_key_value_heads", 2),
        number("norm_epsilon", "norm_epsilon", 1e-5),
        number("hidden_dropout", "embedding_dropout", 0.0),
        number("hidden_dropout", "residual_dropout", 0.0),
        choice("hidden_act", GELU_TANH, "gelu_pytorch_tanh"),
        choice("use_bias", {n: {"disable_bias_linear": not n} for n in (True, False)}, True),
        untied(True),
        rope(),
        window(),
    ),
    layer={**NORMS, **ATTENTION, "mlp.linear_fc1": same("mlp.c_fc"), "mlp.linear_fc2": same("mlp.c_proj")},
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    llama_like(
        *GROUPED,
        NO_BIAS,
        required("num_experts", "num_local_experts"),
        count("moe_router_topk", "num_experts_per_tok", 2),
        constant("router_jitter_noise", 0.0),
        rope(base=1e6),
        window(),
        epsilon=1e-5,
    ),
    layer={
        **NORMS,
        **ATTENTION,
        "mlp.router": same("block_sparse_moe.gate"),
        "mlp.experts.linear_fc1": Experts(("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3")),
        "mlp.experts.linear_fc2": Experts(("block_sparse_moe.experts.{e}.w2",)),
    },
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    llama_like(
        *GROUPED,
        attention_biases(),
        QK_NORM,
        old_names(required("num_experts", "num_experts"), num_experts="num_local_experts"),
        count("moe_router_topk", "num_experts_per_tok", 8),
        required("moe_ffn_hidden_size", "moe_intermediate_size"),
        # Probabilities that are normalised after the choice are a softmax over the chosen experts.
        choice("norm_topk_prob", {n: {"moe_router_pre_softmax": not n} for n in (False, True)}, False),
        sparse_layers(),
        rope(),
        window(switch=True),
    ),
    layer={**DENSE, **QK_NORMS, **EXPERTS},
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    llama_like(
        constant("attention_bias", False, options={"disable_bias_linear": True}),
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
        normalised_topk(8),
        required("moe_ffn_hidden_size", "moe_intermediate_size"),
        number("moe_router_topk_scaling_factor", "routed_scaling_factor", 2.5),
        expert_groups(),
        shared_experts(),
        dense_first(),
        rope("yarn"),
    ),
    layer={**NORMS, **LATENT, **MLP, **EXPERTS, **SHARED},
)
FAMILIES = {row.model_type: row for row in list(vars().values()) if isinstance(row, Family)}
"""All families by model_type, in the order of the rows. A model is written as the first that can express it."""
