"""megatron-core's configuration and layers of models with experts or latent attention, on the CPU."""

from __future__ import annotations

from typing import Any

import torch

LATENT_FIELDS = """q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base
    rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"""


def core_config(c: Any, **more: Any) -> Any:
    """The configuration of the model that HAL's `c` describes, with `more` of its fields."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kinds, coefficients = list(c.moe_router_load_balancing_type), [float(v) for v in c.moe_aux_loss_coeff]
    latent = {name: getattr(c, name) for name in LATENT_FIELDS.split()} if c.multi_latent_attention else {}
    fields = dict(
        **latent,
        qk_layernorm=c.qk_layernorm,
        num_layers=c.num_layers,
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_query_groups,
        ffn_hidden_size=c.ffn_hidden_size,
        gated_linear_unit=c.swiglu,
        activation_func=torch.nn.functional.silu if c.swiglu else torch.nn.functional.gelu,
        normalization=c.normalization,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
        num_moe_experts=c.num_experts,
        moe_layer_freq=eval(c.moe_layer_freq),
        moe_ffn_hidden_size=c.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=c.moe_shared_expert_intermediate_size,
        moe_router_topk=c.moe_router_topk,
        moe_router_load_balancing_type=kinds if len(kinds) > 1 else kinds[0],
        moe_aux_loss_coeff=coefficients if len(kinds) > 1 else coefficients[0],
        moe_z_loss_coeff=c.moe_z_loss_coeff,
        moe_router_score_function=c.moe_router_score_function,
        moe_router_pre_softmax=c.moe_router_pre_softmax,
        moe_router_num_groups=c.moe_router_num_groups,
        moe_router_group_topk=c.moe_router_group_topk,
        moe_router_topk_scaling_factor=c.moe_router_topk_scaling_factor,
        moe_router_enable_expert_bias=c.moe_router_enable_expert_bias,
        moe_router_bias_update_rate=c.moe_router_bias_update_rate,
        moe_router_dtype=c.moe_router_dtype,
        moe_expert_capacity_factor=c.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=c.moe_pad_expert_input_to_capacity,
        moe_token_drop_policy=c.moe_token_drop_policy,
    )
    if c.num_experts is None:
        fields = {name: value for name, value in fields.items() if not name.startswith("moe_")}
    return (MLATransformerConfig if latent else TransformerConfig)(**{**fields, **more})


def core_spec(config: Any) -> Any:
    """megatron-core's own layers, without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class CoreAttention(DotProductAttention):
        """Latent attention passes the head sizes to its core attention. Transformer Engine's takes them; the local one
        does not, but computes with the sizes of its tensors, and only the size of the result is set beforehand.
        (The base class of latent attention first builds one without sizes, which is replaced.)"""

        def __init__(self, *, k_channels: int = 0, v_channels: int = 0, **given: Any) -> None:
            super().__init__(**given)
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if config.multi_latent_attention:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CoreAttention
    return spec
