"""Each rule between fields of a config.json and options, in both directions, with values from transformers' docs."""

from __future__ import annotations

from typing import Any

import pytest

from hal.model.apps.convert import field_rules as rules
from hal.model.apps.convert.field_rules import Rule
from hal.model.apps.convert.hf_config import Fields
from hal.model.apps.convert.weights import ConversionError
from hal.model.config.schema import Config

WINDOW = {"sliding_window": 5, "max_position_embeddings": 16, "num_hidden_layers": 4}
UNBIASED = {"disable_bias_linear": True, "add_qkv_bias": False, "add_dense_bias": False, "add_mlp_bias": False}
SPARSE = {"num_hidden_layers": 4}
BEHIND = rules.window(rules.behind, switch=True)
GEMMA2 = rules.window(rules.every_other, default=4096)
SMOLLM3 = rules.window(rules.unrotated, switch=True)
SWITCHED = {**WINDOW, "use_sliding_window": True}
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "rule, fields, options",
    [
        (rules.required("num_experts", "n"), {"n": 8}, {"num_experts": 8}),
        (rules.count("kv_channels", "head_dim"), {}, {}),
        (rules.count("kv_channels", "head_dim"), {"head_dim": None}, {}),
        (rules.count("kv_channels", "head_dim", 256), {"head_dim": None}, {"kv_channels": 256}),
        (rules.number("norm_epsilon", "eps", 1e-5), {}, {"norm_epsilon": 1e-5}),
        (rules.constant("bias", False, options={"swiglu": True}), {}, {"swiglu": True}),
        (rules.constant("bias", False, missing=False), {"bias": None}, {}),
        (rules.choice("kind", {"a": {"swiglu": True}, "b": {}}, "b"), {"kind": "a"}, {"swiglu": True}),
        (rules.choice("kind", {"a": {"swiglu": True}, "b": {}}, "b"), {"kind": None}, {}),
        (rules.attention_biases(), {}, UNBIASED),
        (rules.attention_biases(True), {}, {**UNBIASED, "add_qkv_bias": True, "add_dense_bias": True}),
        (rules.attention_biases(mlp=True), {"attention_bias": True}, {"disable_bias_linear": False}),
        # SmolLM3's fourth, eighth, ... layers have no rotary positions, unless the file lists 0 for them.
        (rules.no_rope(), {"num_hidden_layers": 5}, {"no_rope_freq": "[0,0,0,1,0]"}),
        (rules.no_rope(), {"num_hidden_layers": 4, "no_rope_layer_interval": 2}, {"no_rope_freq": "[0,1,0,1]"}),
        (rules.no_rope(), {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 1]}, {"no_rope_freq": "[1,0,0]"}),
        (rules.no_rope(), {"num_hidden_layers": 3}, {}),
        # A window of 5 tokens: a query sees itself and 4 before it.
        (rules.window(), WINDOW, {"pre_tokens": 4}),
        (rules.window(), {**WINDOW, "sliding_window": 1}, {"pre_tokens": 0}),
        (rules.window(), {**WINDOW, "sliding_window": 15}, {"pre_tokens": 14}),
        (rules.window(), {**WINDOW, "sliding_window": 16}, {}),
        (rules.window(), {**WINDOW, "use_sliding_window": False}, {}),
        (BEHIND, WINDOW, {}),
        (BEHIND, SWITCHED, {}),  # max_window_layers is 28 in a file without it
        (
            BEHIND,
            {**SWITCHED, "num_hidden_layers": 30},
            {"pre_tokens": 4, "window_attn_skip_freq": f"[{'0,' * 28}1,1]"},
        ),
        (BEHIND, {**SWITCHED, "max_window_layers": 1}, {"pre_tokens": 4, "window_attn_skip_freq": "[0,1,1,1]"}),
        (BEHIND, {**SWITCHED, "max_window_layers": 0}, {"pre_tokens": 4}),
        (BEHIND, {**SWITCHED, "layer_types": KINDS}, {"pre_tokens": 4, "window_attn_skip_freq": "[1,0,0,1]"}),
        (GEMMA2, WINDOW, {"pre_tokens": 4, "window_attn_skip_freq": "[1,0,1,0]"}),
        (GEMMA2, {"max_position_embeddings": 8192, "num_hidden_layers": 1}, {"pre_tokens": 4095}),
        (SMOLLM3, SWITCHED, {"pre_tokens": 4, "window_attn_skip_freq": "[0,0,0,1]"}),
        (rules.cap("attn_softcap", "cap", 50.0), {}, {"attn_softcap": 50.0}),
        (rules.cap("attn_softcap", "cap", 50.0), {"cap": None}, {}),
        (rules.power("softmax_scale", "scalar", -0.5, 256), {}, {"softmax_scale": 1 / 16}),
        (rules.power("softmax_scale", "scalar", -0.5, 256), {"scalar": 0.25}, {"softmax_scale": 2.0}),
        (rules.scaled_embedding(), {"hidden_size": 2304}, {"embedding_multiplier_scale": 48.0}),
        (rules.sparse_layers(), SPARSE, {"moe_layer_freq": "[1,1,1,1]"}),
        (rules.sparse_layers(), {**SPARSE, "mlp_only_layers": [0, 3]}, {"moe_layer_freq": "[0,1,1,0]"}),
        (rules.sparse_layers(), {**SPARSE, "decoder_sparse_step": 3}, {"moe_layer_freq": "[0,0,1,0]"}),
        (
            rules.sparse_layers(),
            {**SPARSE, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
            {"moe_layer_freq": "[0,0,0,1]"},
        ),
        (rules.dense_first(), {"num_hidden_layers": 5}, {"moe_layer_freq": "[0]*3+[1]*2"}),
        (rules.dense_first(), {**SPARSE, "first_k_dense_replace": 4}, {"moe_layer_freq": "[0]*4+[1]*0"}),
        (rules.dense_first(), {**SPARSE, "first_k_dense_replace": 0}, {"moe_layer_freq": "[0]*0+[1]*4"}),
        (rules.normalised_topk(8), {}, {"moe_router_topk": 8}),
        (rules.normalised_topk(8), {"num_experts_per_tok": 2}, {"moe_router_topk": 2}),
        (rules.normalised_topk(8), {"num_experts_per_tok": 1, "norm_topk_prob": False}, {"moe_router_topk": 1}),
        (rules.expert_groups(), {}, {"moe_router_num_groups": 8, "moe_router_group_topk": 4}),
        (
            rules.expert_groups(),
            {"n_group": 2, "topk_group": 1},
            {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
        ),
        (rules.expert_groups(), {"n_group": 1}, {}),
        (rules.shared_experts(), {"moe_intermediate_size": 6}, {"moe_shared_expert_intermediate_size": 6}),
        (
            rules.shared_experts(),
            {"n_shared_experts": 2, "moe_intermediate_size": 6},
            {"moe_shared_expert_intermediate_size": 12},
        ),
        (rules.shared_experts(), {"n_shared_experts": 0}, {}),
        (rules.shared_experts(), {"n_shared_experts": None}, {}),
        (rules.old_names(rules.required("num_experts", "new"), new="old"), {"old": 4}, {"num_experts": 4}),
        (rules.old_names(rules.required("num_experts", "new"), new="old"), {"new": 3, "old": None}, {"num_experts": 3}),
    ],
)
def test_options_of_fields(rule: Rule, fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert rule.read(Fields(fields, "config.json")) == options


MODEL = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 16}
EXPERTS = {**MODEL, "num_experts": 4, "moe_ffn_hidden_size": 6, "moe_router_topk": 2, "disable_bias_linear": True}


@pytest.mark.parametrize(
    "rule, options, fields",
    [
        (rules.constant("bias", False), {}, {"bias": False}),
        (rules.choice("kind", {"a": {"swiglu": True}, "b": {"swiglu": False}}, "a"), {}, {"kind": "b"}),
        (rules.choice("kind", {"a": {"swiglu": True}, "b": {"geglu": True}}, "b"), {}, {"kind": "a"}),
        (rules.attention_biases(), {"disable_bias_linear": True, "add_qkv_bias": True}, {"attention_bias": False}),
        (rules.attention_biases(), {}, {"attention_bias": True}),
        (rules.linear_biases(), {}, {"attention_bias": True, "mlp_bias": True}),
        (rules.linear_biases(), {"disable_bias_linear": True}, {"attention_bias": False, "mlp_bias": False}),
        (
            rules.no_rope(),
            {"position_embedding_type": "rope", "no_rope_freq": "[0,1,0,0]"},
            {"no_rope_layers": [1, 0, 1, 1]},
        ),
        (rules.window(), {}, {"sliding_window": None}),
        (rules.window(), {"pre_tokens": 4, "next_tokens": 0}, {"sliding_window": 5}),
        (
            BEHIND,
            {"pre_tokens": 4, "next_tokens": 0, "window_attn_skip_freq": "[0,1,1,1]"},
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 1,
                "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
            },
        ),
        (
            BEHIND,
            {},
            {
                "sliding_window": None,
                "use_sliding_window": False,
                "max_window_layers": 4,
                "layer_types": ["full_attention"] * 4,
            },
        ),
        (rules.power("softmax_scale", "scalar", -0.5), {"softmax_scale": 1 / 16}, {"scalar": 256}),
        (rules.power("softmax_scale", "scalar", -0.5), {"kv_channels": 9}, {"scalar": 9}),
        (rules.power("softmax_scale", "scalar", 1.0), {"softmax_scale": 1.5}, {"scalar": 1.5}),
        (
            rules.sparse_layers(),
            {**EXPERTS, "moe_layer_freq": "[1,0,1,1]"},
            {"mlp_only_layers": [1], "decoder_sparse_step": 1},
        ),
        (rules.dense_first(), {**EXPERTS, "moe_layer_freq": "[0,0,1,1]"}, {"first_k_dense_replace": 2}),
        (rules.dense_first(), {**EXPERTS, "moe_layer_freq": "[0,0,0,0]"}, {"first_k_dense_replace": 4}),
        (rules.normalised_topk(8), EXPERTS, {"num_experts_per_tok": 2, "norm_topk_prob": True}),
        (
            rules.normalised_topk(8),
            {**EXPERTS, "moe_router_topk": 1},
            {"num_experts_per_tok": 1, "norm_topk_prob": False},
        ),
        (rules.expert_groups(), EXPERTS, {"n_group": 1, "topk_group": 1}),
        (
            rules.expert_groups(),
            {**EXPERTS, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
            {"n_group": 2, "topk_group": 1},
        ),
        (rules.shared_experts(), {**EXPERTS, "moe_shared_expert_intermediate_size": 12}, {"n_shared_experts": 2}),
        (rules.shared_experts(), EXPERTS, {"n_shared_experts": None}),
        (rules.shared_experts(), {**EXPERTS, "moe_ffn_hidden_size": 1}, {"n_shared_experts": None}),
    ],
)
def test_fields_of_options(rule: Rule, options: dict[str, Any], fields: dict[str, Any]) -> None:
    assert rule.write(Config(**{**MODEL, **options})) == fields


@pytest.mark.parametrize(
    "rule, fields, reason",
    [
        (rules.no_rope(), {"num_hidden_layers": 2, "no_rope_layers": "11"}, "should be a list"),
        (rules.window(), {**WINDOW, "layer_types": ["chunked_attention"]}, "layer_types"),
        (rules.window(), {**WINDOW, "layer_types": "sliding_attention"}, "layer_types"),
        (rules.window(), {**WINDOW, "layer_types": KINDS}, "in some layers only"),
        (rules.power("softmax_scale", "scalar", -0.5), {"scalar": 0}, "should be positive"),
        (rules.sparse_layers(), {**SPARSE, "mlp_only_layers": 1}, "should be a list"),
        (rules.dense_first(), {**SPARSE, "first_k_dense_replace": 5}, "should be a number of layers"),
        (rules.dense_first(), {**SPARSE, "first_k_dense_replace": -1}, "should be a number of layers"),
        (rules.normalised_topk(8), {"norm_topk_prob": False}, "norm_topk_prob"),
        (rules.normalised_topk(8), {"num_experts_per_tok": 1}, "norm_topk_prob"),
    ],
)
def test_fields_that_a_rule_refuses(rule: Rule, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConversionError, match=reason):
        rule.read(Fields(fields, "config.json"))
