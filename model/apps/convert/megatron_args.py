"""Converts the `args` in Megatron-LM's checkpoints to HAL's options and back.

Features that HAL does not convert from or to these checkpoints are refused by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.saved_config import model_options
from ...config import experts, latent
from ...config.command_line import convert
from ...config.experts import layer_pattern
from ...config.schema import Config
from ...config.tokenizer_options import KINDS, OPTIONS
from .weights import ConversionError, Weights, require

_SHARED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "qk_layernorm",
)
# Options that do not change what the weights compute, and of which Megatron has other values or none.
_HOW = {"moe_token_dispatcher_type", "moe_per_layer_logging"}
_EXPERTS = [name for name in experts.OPTIONS.split() if name not in _HOW]
_LATENT = f"{latent.OPTIONS} {latent.YARN} rope_type rotary_scaling_factor original_max_position_embeddings".split()
# Features that are not read from these checkpoints, by the arg that turns them on. 0, 1 and False are neutral.
_UNSUPPORTED = {
    "squared_relu": "squared relu",
    "use_rope_scaling": "scaled rotary positions",
    "rotary_seq_len_interpolation_factor": "interpolated rotary positions",
    "apply_layernorm_1p": "zero-centred norms",
    "apply_residual_connection_post_layernorm": "residuals taken after the norm",
    "window_size": "an attention window",
    "mtp_num_layers": "multi-token prediction layers",
    "is_hybrid_model": "state-space layers",
    "hybrid_layer_pattern": "state-space layers",
    "hybrid_override_pattern": "state-space layers",
    "quick_geglu": "quick geglu",
    "attention_output_gate": "a gate on the attention output",
    "num_layers_at_start_in_bf16": "layers of different precisions",
    "qk_l2_norm": "norms of queries and keys",
    "heterogeneous_layers_config_path": "heterogeneous layers",
    "linear_attention_freq": "linear attention layers",
    "experimental_attention_variant": "an experimental attention variant",
    "moe_shared_expert_gate": "a gate on the shared expert",
    "moe_latent_size": "experts of another width",
    "moe_apply_probs_on_input": "probabilities that scale the experts' input",
    "moe_extended_tp": "experts divided over all ranks",
}
# The same, for args of which 1 is not neutral.
_UNSUPPORTED_EVEN_IF_ONE = {
    "softmax_scale": "a custom attention scale",
    "glu_linear_offset": "an offset in the gated MLP",
    "activation_func_clamp_value": "a clamped activation",
    "no_rope_freq": "layers without rotary positions",
}


# Model options that do not change what the weights compute.
_NOT_SHAPING = {"embedding_init_method_std", "use_flash_attn", "shape_order", "mask_padded_vocab", "pad_vocab_size_to"}
_NOT_SHAPING |= _HOW


def saved_args(state: Any, where: Path) -> tuple[Mapping[str, Any], int, float]:
    """(args, iteration, checkpoint_version) of a checkpoint's file. Raises ConversionError for other types."""
    require(isinstance(state, Mapping), f"{where} should be a dictionary; found {type(state).__name__}")
    args = state.get("args")
    require(args is not None, f"{where} does not describe its model: it has no args")
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    valid = isinstance(args, Mapping) and not any(isinstance(value, torch.Tensor) for value in args.values())
    require(valid, f"{where}: args should be options by name; found {type(args).__name__}")
    iteration, version = state.get("iteration"), state.get("checkpoint_version", 0.0)
    iteration = 0 if iteration is None else iteration
    require(
        type(iteration) is int and iteration >= 0,
        f"{where}: iteration should be an integer of at least 0; found {iteration!r}",
    )
    valid = isinstance(version, (int, float)) and 0 <= version < 100
    require(valid, f"{where}: checkpoint_version should be a number from 0 to 100; found {version!r}")
    return args, iteration, float(version)


def options_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Model options of a Config. Raises ConversionError for unsupported features and for values of a wrong type."""
    for name, what in _UNSUPPORTED.items():
        value = args.get(name)
        neutral = not value or (value == 1 and value is not True)
        require(
            neutral,
            f"the model has {what} ({name} = {value!r}), which HAL does not convert from Megatron's checkpoints",
        )
    for name, what in _UNSUPPORTED_EVEN_IF_ONE.items():
        value = args.get(name)
        require(
            value in (None, 0, False),
            f"the model has {what} ({name} = {value!r}), which HAL does not convert from Megatron's checkpoints",
        )
    softmax, rope, is_latent = args.get("softmax_type"), args.get("rope_type"), bool(args.get("multi_latent_attention"))
    require(
        softmax in (None, "vanilla"),
        f"the softmax of attention is of type {softmax!r}, which HAL does not convert from Megatron's checkpoints",
    )
    require(
        rope in (None, "rope") or is_latent,
        f"rotary positions are of type {rope!r}, which HAL does not convert from Megatron's checkpoints",
    )
    has_experts = bool(args.get("num_experts"))
    names = [*_SHARED, *(["num_experts", *_EXPERTS] if has_experts else []), *(_LATENT if is_latent else [])]
    options = {name: args[name] for name in names if args.get(name) is not None}
    if isinstance(options.get("moe_layer_freq"), list):
        options["moe_layer_freq"] = str(options["moe_layer_freq"])
    options["multi_latent_attention"] = is_latent
    if "norm_epsilon" not in options and args.get("layernorm_epsilon") is not None:
        options["norm_epsilon"] = args["layernorm_epsilon"]
    if args.get("group_query_attention"):
        options["num_query_groups"] = args.get("num_query_groups")
    rotary = args.get("use_rotary_position_embeddings") or args.get("position_embedding_type") == "rope"
    options["position_embedding_type"] = "rope" if rotary else args.get("position_embedding_type", "learned_absolute")
    options["disable_bias_linear"] = not args.get("add_bias_linear", True)
    if args.get("is_x_model"):  # set by megatron_npu, whose MLP is then a GEGLU
        require(not has_experts, "the model has experts and is_x_model, which HAL does not convert")
        width = args.get("ffn_hidden_size")
        if not isinstance(width, int) or width % 2:
            raise ConversionError(f"ffn_hidden_size {width!r} should be two equal halves")
        options |= {"geglu": True, "gelu_approximate": "none", "ffn_hidden_size": width // 2}
    elif not options.get("swiglu"):
        # Megatron computes the exact gelu, unless it fuses gelu with the bias, which uses the tanh approximation.
        approximate = args.get("bias_gelu_fusion", True) or args.get("openai_gelu") or args.get("onnx_safe")
        options["gelu_approximate"] = "tanh" if approximate else "none"
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        value = options.get(name)
        require(isinstance(value, int) and value > 0, f"the checkpoint's args have no valid {name}")
    return {name: convert(name, value, f"the checkpoint's args: {name}") for name, value in options.items()}


def tokenizer_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Tokenizer options of a Config, if HAL has this tokenizer."""
    kind = args.get("tokenizer_type")
    if not isinstance(kind, str) or kind not in KINDS:
        return {}
    read = {*KINDS[kind].needs, *KINDS[kind].takes}
    options = {name: args.get(name) for name in OPTIONS if name in read and isinstance(args.get(name), (int, str))}
    return {"tokenizer_type": kind, **options} if set(KINDS[kind].needs) <= set(options) else {}


def stacks_layers(config: Config) -> bool:
    """Whether megatron-core's distributed checkpoints stack the tensors of the layers: if all are of one kind."""
    return config.num_experts is None or config.moe_layer_freq.strip() == "1"


def _meaning(config: Config, name: str) -> Any:
    """The value of an option, independent of its spelling."""
    value = getattr(config, name)
    if config.num_experts is not None and name == "moe_layer_freq":
        return layer_pattern(value, config.num_layers)
    return [float(x) for x in value] if name == "moe_aux_loss_coeff" else value


def args_of(
    weights: Weights,
    config: Config,
    *,
    padded: int,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    transformer_impl: str = "local",
    grouped: bool = False,
) -> argparse.Namespace:
    """The args of Megatron's checkpoints for the model of `weights`, whose Config is `config`.

    padded: rows of the padded vocabulary. grouped: --moe-grouped-gemm. Raises ConversionError if they would describe
    another model.
    """
    groups = config.num_query_groups
    model: dict[str, Any] = {name: getattr(config, name) for name in _SHARED}
    if config.num_experts is not None:
        frequency = config.moe_layer_freq.strip()
        pattern = layer_pattern(frequency, config.num_layers)
        model |= {name: getattr(config, name) for name in (*_EXPERTS, "moe_token_dispatcher_type")}
        model["moe_layer_freq"] = int(frequency) if frequency.isdigit() else list(map(int, pattern))
        kinds, coefficients = config.moe_router_load_balancing_type, [float(x) for x in config.moe_aux_loss_coeff]
        model["moe_router_load_balancing_type"] = list(kinds) if len(kinds) > 1 else kinds[0]
        model["moe_aux_loss_coeff"] = coefficients if len(kinds) > 1 else coefficients[0]
        model["moe_grouped_gemm"] = grouped
    if config.multi_latent_attention:
        model |= {name: getattr(config, name) for name in _LATENT}
    args = argparse.Namespace(
        **model,
        num_experts=config.num_experts,
        multi_latent_attention=config.multi_latent_attention,
        position_embedding_type=config.position_embedding_type,
        use_rotary_position_embeddings=config.position_embedding_type == "rope",
        group_query_attention=groups != config.num_attention_heads,
        num_query_groups=groups,
        add_bias_linear=not config.disable_bias_linear,
        bias_gelu_fusion=config.gelu_approximate == "tanh" and not config.swiglu,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=weights.dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        num_layers_per_virtual_pipeline_stage=None,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        padded_vocab_size=padded,
        make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
        iteration=weights.iteration,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        transformer_impl=transformer_impl,
        **{name: getattr(config, name) for name in OPTIONS},
        tokenizer_type=config.tokenizer_type,
    )
    read = replace(weights, options=options_of(vars(args)))
    described = read.config(make_vocab_size_divisible_by=config.make_vocab_size_divisible_by)
    lost = [n for n in model_options() if n not in _NOT_SHAPING and _meaning(described, n) != _meaning(config, n)]
    names = ", ".join("--" + name.replace("_", "-") for name in lost)
    require(not lost, f"{names} of this model: not converted to Megatron's checkpoints")
    return args
