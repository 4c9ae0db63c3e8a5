"""megatron-core's layer specs with HAL's ops: a BackendSpecProvider, a layer spec and a block spec.

From Megatron-LM's scripts: `--spec hal.model.megatron gpt_layer_spec`. Linear layers are megatron-core's own.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from .core_attention import HalCoreAttention, HalSelfAttention
from .core_layers import HalMLPOrExperts, HalNorm, get_bias_dropout_add


class HalSpecProvider(LocalSpecProvider):
    """The modules for megatron-core's specs: HAL's if HAL has the op, otherwise megatron-core's local ones."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return HalNorm

    def core_attention(self) -> type:
        return HalCoreAttention


def get_gpt_layer_hal_spec(qk_layernorm: bool = False) -> ModuleSpec:
    """The spec of a GPT's transformer layer with HAL's ops, like get_gpt_layer_local_spec with torch's. Experts are
    megatron-core's own."""
    provider = HalSpecProvider()
    norm = provider.layer_norm()
    qk_norm = norm if qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=HalSelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=HalMLPOrExperts, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
            # Transformer Engine's names, so that names in checkpoints do not depend on the layer implementation.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


gpt_layer_spec = get_gpt_layer_hal_spec()
"""For `--spec`. It does not include the block's final norm, which megatron-core chooses itself (see hal_ops)."""


def gpt_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """HAL's layers and final norm of this pipeline stage, for a GPT of `config`."""
    count = get_num_layers_to_build(config, vp_stage)
    layer = get_gpt_layer_hal_spec(qk_layernorm=config.qk_layernorm)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=HalNorm)
