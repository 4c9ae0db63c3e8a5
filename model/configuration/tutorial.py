"""The nested YAML of the MindFormers tutorial: train_config, accelerate_config, model_config.llm.

Its schema is published nowhere; the keys are those of the tutorial. `kv_group_size` is read as the number of key/value
heads (`num_query_groups`), and said so, since the name could also mean query heads per group.
"""

from __future__ import annotations

from typing import Any

from .mindspeed import ACTIVATIONS, NORMS, POSITIONS, PRECISIONS, biases, pipeline
from .rules import MICROBATCHES, Reading, Rule, int_of, kept, noted, only, scaled, take, to

SECTIONS = ("train_config", "accelerate_config", "model_config")

_TRAIN, _PARALLEL, _PRECISION = (
    "train_config.ms_training_config",
    "accelerate_config.parallelization",
    "accelerate_config.precision",
)
_PIPELINE, _LLM, _ATTENTION, _FFN = (
    f"{_PARALLEL}.pipeline",
    "model_config.llm",
    "model_config.llm.blocks.attention",
    "model_config.llm.blocks.ffn",
)


def _float32(what: str) -> Rule:
    return only("float32", "fp32", why=f"{what} in float32 always")


def _operators(fused: bool) -> Rule:
    def rule(reading: Reading, key: str, value: Any) -> None:
        names = value if isinstance(value, list) else str(value or "").split(",")
        for name in (str(n).strip() for n in names if n):
            if name == "flash_attention":
                reading.set("use_flash_attn", fused, key)
            elif name == "masked_softmax":
                reading.note(key, "masked_softmax is used where flash attention is not")
            elif name in ("rope", "rmsnorm", "swiglu", "gradient_accumulation"):
                if not fused:
                    reading.note(key, f"whether {name} is fused is the backend's choice; --pin names an implementation")
            else:
                raise reading.refuse(key, f"there is no operator {name!r}")

    return rule


RULES: dict[str, Rule] = {
    f"{_TRAIN}.resume_training": kept("resume"),
    f"{_TRAIN}.wrap_with_ddp": noted("gradients are always reduced in buckets", True),
    f"{_TRAIN}.bucket_size": to("ddp_bucket_size"),
    f"{_PARALLEL}.tensor_parallel": to("tensor_model_parallel_size"),
    f"{_PARALLEL}.use_sequence_parallel": to("sequence_parallel"),
    f"{_PARALLEL}.use_distributed_optimizer": to("use_distributed_optimizer"),
    f"{_PIPELINE}.num_stages": to("pipeline_model_parallel_size"),
    f"{_PIPELINE}.layer_list": kept("layer_list"),
    f"{_PIPELINE}.micro_batch_size": to("micro_batch_size"),
    f"{_PIPELINE}.micro_batch_num": to(MICROBATCHES),
    f"{_PIPELINE}.noop_layers": to("noop_layers"),
    f"{_PIPELINE}.num_layers_per_vpp": to("num_layers_per_virtual_pipeline_stage"),
    f"{_PIPELINE}.virtual_pipeline_model_parallel_size": kept("virtual"),
    f"{_PRECISION}.param_init_dtype": _float32("weights are drawn"),
    f"{_PRECISION}.compute_dtype": scaled("bf16", PRECISIONS),
    f"{_PRECISION}.softmax_compute_dtype": _float32("softmax is computed"),
    f"{_PRECISION}.logits_compute_dtype": _float32("the loss of the logits is computed"),
    f"{_PRECISION}.grad_accumulation_dtype": _float32("gradients are summed"),
    f"{_PRECISION}.residual-connection": kept("residual"),
    f"{_PRECISION}.fused_operators": _operators(True),
    f"{_PRECISION}.nofused_operators": _operators(False),
    f"{_LLM}.tokenizer.padded_size": to("pad_vocab_size_to"),
    f"{_LLM}.tokenizer.divided_by": kept("divided_by"),
    f"{_LLM}.tokenizer.use_fast": noted("tokenizers are always the fast ones", True),
    f"{_LLM}.embedding.hidden_size": to("hidden_size"),
    f"{_LLM}.embedding.init_std": to("embedding_init_method_std"),
    f"{_LLM}.position.type": scaled("position_embedding_type", POSITIONS),
    f"{_LLM}.position.max_size": to("max_position_embeddings"),
    f"{_LLM}.position.rope_base": to("rotary_base"),
    f"{_LLM}.blocks.num_layers": to("num_layers"),
    f"{_LLM}.blocks.init_std": to("init_method_std"),
    f"{_LLM}.blocks.sandwich_norm": to("use_sandwich_norm"),
    f"{_LLM}.blocks.layernorm.norm_type": scaled("normalization", NORMS),
    f"{_LLM}.blocks.layernorm.epsilon": to("norm_epsilon"),
    f"{_ATTENTION}.attention_type": kept("attention_type"),
    f"{_ATTENTION}.head_num": to("num_attention_heads"),
    f"{_ATTENTION}.kv_group_size": kept("kv_groups"),
    f"{_ATTENTION}.qkv_bias": kept("qkv_bias"),
    f"{_ATTENTION}.projection_bias": kept("proj_bias"),
    f"{_ATTENTION}.dropout_rate": to("attention_dropout"),
    f"{_ATTENTION}.post_norm_scale": to("attn_post_norm_scale"),
    f"{_FFN}.hidden_size": to("ffn_hidden_size"),
    f"{_FFN}.activation": scaled("swiglu", ACTIVATIONS),
    f"{_FFN}.dropout_rate": to("hidden_dropout"),
    f"{_FFN}.mlp_bias": kept("linear_bias"),
    f"{_FFN}.post_norm_scale": to("ffn_post_norm_scale"),
    f"{_LLM}.head.shared_embedding": kept("shared"),
}


def finish(reading: Reading) -> None:
    """What follows from several keys together."""
    values = reading.values
    shared, key = take(reading, "shared")
    if key:
        if not isinstance(shared, bool):
            raise reading.refuse(key, f"True or False; found {shared!r}")
        reading.set("untie_embeddings_and_output_weights", not shared, key)
    _groups(reading)
    residual, key = take(reading, "residual")
    if key and PRECISIONS.get(str(residual)) != {name: values.get(name, False) for name in ("bf16", "fp16")}:
        raise reading.refuse(key, f"{residual!r}, but the residual stream has the dtype of compute_dtype")
    divided, key = take(reading, "divided_by")
    if key and values.get("pad_vocab_size_to", 0) % int_of(divided, f"{reading.file}: {key}"):
        raise reading.refuse(key, f"padded_size {values['pad_vocab_size_to']} is not divisible by {divided}")
    if key and "pad_vocab_size_to" not in values:
        reading.set("make_vocab_size_divisible_by", divided, key)
    resume, key = take(reading, "resume")
    if resume is True:
        raise reading.refuse(key, "True; the tutorial does not say from where. Give --load FOLDER and remove the key")
    biases(reading)
    pipeline(reading)


def _groups(reading: Reading) -> None:
    groups, key = take(reading, "kv_groups")
    kind, kind_key = take(reading, "attention_type")
    if kind_key and kind not in ("GQA", "MHA", "MQA"):
        raise reading.refuse(kind_key, f"GQA, MHA or MQA; found {kind!r}")
    if kind == "MQA":
        reading.set("num_query_groups", 1, kind_key)
    if kind == "MHA" and key and groups != reading.values.get("num_attention_heads"):
        raise reading.refuse(key, f"{groups} groups, but {kind_key} is MHA: one group per head. Remove one of them")
    if kind == "GQA" and not key:
        raise reading.refuse(kind_key, "GQA needs kv_group_size")
    if key and kind != "MHA":
        reading.set("num_query_groups", groups, key)
        reading.note(key, f"read as {groups} key/value heads (--num-query-groups), not as heads per group")
