"""config.json of a Llama, field by field: transformers' defaults; fields that would change results are refused. Fields
of its relatives that HAL computes otherwise are, too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hal import HalError
from hal.model.apps.convert import family_weights
from hal.model.apps.convert.families import DEEPSEEK_V3, GEMMA2, GPT_NEOX, LLAMA
from hal.model.apps.convert.family import Family
from hal.model.apps.convert.field_rules import behind, window
from hal.model.apps.convert.hf_config import Fields
from hal.model.config.schema import Config

SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}


def options(**fields: Any) -> dict[str, Any]:
    """The options of a Config, defaults included."""
    read = family_weights.options_of(LLAMA, Fields({**SIZES, **fields}, "config.json"))
    return vars(Config(**read))


def test_what_a_file_leaves_out_is_transformers_default() -> None:
    config = pytest.importorskip("transformers", reason="needs transformers (extra: convert)").LlamaConfig
    assert options() == options(**config(**SIZES).to_dict())
    expected = {
        "num_layers": 1,
        "hidden_size": 8,
        "ffn_hidden_size": 12,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 2,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "position_embedding_type": "rope",
        "rotary_base": 10000.0,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.02,
    }
    assert {name: options()[name] for name in expected} == expected


def test_what_a_file_says_is_taken() -> None:
    biases = "add_qkv_bias", "add_dense_bias", "add_mlp_bias"
    for attention, mlp in itertools.product([False, True], repeat=2):
        read = options(attention_bias=attention, mlp_bias=mlp)
        assert [read[name] or not read["disable_bias_linear"] for name in biases] == [attention, attention, mlp]
    assert options(tie_word_embeddings=True)["untie_embeddings_and_output_weights"] is False
    assert options(rope_theta=500.0)["rotary_base"] == 500.0
    assert options(rope_theta=500.0, rope_parameters={"rope_theta": 7.0})["rotary_base"] == 7.0
    assert options(head_dim=6)["kv_channels"] == 6


NEUTRAL: list[tuple[str, list[Any], Any]] = [
    ("hidden_act", ["silu"], "gelu"),
    ("attention_multiplier", [None], 1),
    ("embedding_multiplier", [None, 1, 1.0], 2),
    ("residual_multiplier", [None, 1, 1.0], 2),
    ("logits_scaling", [None, 1, 1.0], 2),
    ("logit_scale", [None, 1, 1.0], 2),
    ("attn_logit_softcapping", [None], 1),
    ("final_logit_softcapping", [None], 1),
    ("partial_rotary_factor", [None, 1, 1.0], 2),
    ("clip_qkv", [None], 1),
    ("use_qk_norm", [None, False], True),
    ("qk_layernorm", [None, False], True),
    ("num_experts", [None, 0, 1], 2),
    ("num_local_experts", [None, 0, 1], 2),
    ("no_rope_layers", [None, []], [1]),
    ("quantization_config", [None], {}),
    ("rope_scaling", [None, {}, {"rope_type": "default"}, {"type": "default", "factor": 1.0}], {"type": "ntk"}),
    ("rope_scaling", [{"factor": 1, "partial_rotary_factor": 1}], {"factor": 2}),
    ("rope_parameters", [{"rope_type": "default"}, {"partial_rotary_factor": None}], {"partial_rotary_factor": 2}),
    ("sliding_window", [None, 16, 17], 15),
]


@pytest.mark.parametrize("name, neutral, other", NEUTRAL, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(NEUTRAL)])
def test_fields_of_relatives_pass_only_where_they_change_nothing(name: str, neutral: list[Any], other: Any) -> None:
    for value in neutral:
        assert options(**{name: value}) == options()
    with pytest.raises(HalError, match=r"counterpart in HAL's model|has no sliding window"):
        options(**{name: other})


def test_a_window_counts_only_where_it_is_used() -> None:
    assert options(sliding_window=4, use_sliding_window=False) == options()
    for rule, written in ((window(), False), (window(behind, switch=True), True)):
        assert ("use_sliding_window" in rule.write(Config(pre_tokens=3, next_tokens=0))) == written


LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEEPSEEK = dict.fromkeys((*LATENT, "n_routed_experts", "moe_intermediate_size"), 8)


@pytest.mark.parametrize(
    "family, fields, reason",
    [
        # transformers rotates 4 channels of 10, Megatron 2.
        (GPT_NEOX, {"hidden_size": 40, "rotary_pct": 0.3}, "3 channels are not whole pairs"),
        (DEEPSEEK_V3, {**DEEPSEEK, "num_experts_per_tok": 1}, "norm_topk_prob = True"),
    ],
)
def test_what_a_relative_computes_otherwise_is_refused(family: Family, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(HalError, match=reason):
        family_weights.options_of(family, Fields({**SIZES, **fields}, "config.json"))


def test_gemma_2_has_a_width_also_without_windows() -> None:
    """transformers makes the mask of the windows even if no layer uses it."""
    config = Config(num_layers=1, hidden_size=8, num_attention_heads=4)
    assert family_weights.fields_of(GEMMA2, config)["sliding_window"] == 4096


HAL = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "seq_length": 16,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
}


@pytest.mark.parametrize(
    "option, reason",
    [
        ({}, None),
        ({"disable_bias_linear": True}, None),
        ({"position_embedding_type": "none"}, "--position-embedding-type none"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm"),
        ({"squared_relu": True}, "--squared-relu"),
        ({"add_qkv_bias": True, "disable_bias_linear": True}, "--add-qkv-bias"),
        ({"use_sandwich_norm": True}, "--use-sandwich-norm"),
    ],
)
def test_reasons_against_writing_a_model(option: dict[str, Any], reason: str | None) -> None:
    assert family_weights.reasons_against(LLAMA, Config(**{**HAL, **option})) == ([] if reason is None else [reason])
