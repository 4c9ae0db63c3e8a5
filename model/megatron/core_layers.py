"""megatron-core's other transformer layers on HAL's ops: norms, MLP, bias-dropout-add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

import hal.nn
from hal import HalError, ops

from .rng_tracker import next_stream


class HalNorm:
    """Makes a hal.nn.LayerNorm or RMSNorm of megatron-core's arguments, as its TENorm makes Transformer Engine's. It is
    a class because megatron-core uses a function in a specification as a module, without calling it.

    Only config, hidden_size and eps are used. With zero-centered gamma `weight` is gamma - 1. Raises HalError for a
    normalization that HAL lacks.
    """

    def __new__(  # type: ignore[misc]  # not an instance of this class
        cls,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> hal.nn.LayerNorm | hal.nn.RMSNorm:
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise HalError(f"normalization {config.normalization!r}: HAL has LayerNorm and RMSNorm")
        norm: hal.nn.LayerNorm | hal.nn.RMSNorm = getattr(hal.nn, config.normalization)(hidden_size, eps)
        if config.layernorm_zero_centered_gamma:
            nn.init.zeros_(norm.weight)
            norm.offset = 1.0
        for parameter in norm.parameters():
            # Each rank normalises its part of the sequence; this mark makes megatron-core sum the gradients over ranks.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class HalMLP(MLP):
    """megatron-core's MLP with HAL's swiglu, geglu or gelu, fused with the bias of the first layer.

    gelu uses the tanh approximation if megatron-core's fused gelu would (`bias_activation_fusion`), otherwise the exact
    form. Raises HalError for other activations.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("ffn_hidden_size", config.ffn_hidden_size)
        super().__init__(config, *args, **kwargs)
        self.activation = _activation(config)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> Any:
        if per_token_scale is not None:
            raise HalError("HAL's MLP is not an expert layer: it does not support per_token_scale")
        inner, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(self.activation(inner, bias))


class HalMLPOrExperts:
    """Makes a HalMLP, or megatron-core's MoELayer in a model with experts, of megatron-core's arguments.

    Raises HalError for models whose layers differ in this, and for multi-latent attention, which HAL's layers lack.
    """

    def __new__(cls, config: Any, submodules: MLPSubmodules, **kwargs: Any) -> MLP | MoELayer:  # type: ignore[misc]
        if getattr(config, "multi_latent_attention", False):
            raise HalError(
                "HAL's layers do not support --multi-latent-attention and would train another model; leave out --spec"
            )
        if config.num_moe_experts is None:
            return HalMLP(config, submodules, **kwargs)
        if config.moe_layer_freq != 1:
            raise HalError(
                f"--moe-layer-freq {config.moe_layer_freq}: experts would be in all of HAL's layers, which trains "
                "another model; leave out --spec"
            )
        spec = get_moe_module_spec_for_backend(
            LocalSpecProvider(), num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
        return MoELayer(config, spec.submodules)


def _activation(config: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
    plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0
    approximate = "tanh" if config.bias_activation_fusion else "none"
    if plain and config.activation_func is F.silu and config.gated_linear_unit:
        return ops.swiglu
    if plain and config.activation_func is F.gelu:
        op = ops.geglu if config.gated_linear_unit else ops.bias_gelu
        return lambda x, bias: op(x, bias, approximate)
    gated = "gated " if config.gated_linear_unit else ""
    raise HalError(
        f"HAL's MLP supports swiglu, geglu and gelu, without clamping or offset; not {gated}"
        f"{getattr(config.activation_func, '__name__', config.activation_func)}. Use megatron-core's MLP in the spec."
    )


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """megatron-core's function of that name: (x, bias), residual, p -> residual + dropout(x + bias)."""

    def bias_dropout_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, p: float) -> Tensor:
        """x and residual [..., h], bias [h] or None."""
        x, bias = x_with_bias
        dropout: dict[str, Any] = {"p": p, "rng": next_stream()} if training and p > 0.0 else {}
        out: Tensor = ops.bias_dropout_add(x, bias, residual.to(x.dtype), **dropout)
        return out

    return bias_dropout_add
