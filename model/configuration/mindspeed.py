"""MindSpeed-Core-MS's sections: Megatron's arguments under its names, 126 of them.

Where the two disagree, it is said here what holds: `hysteresis` is mapped there to a factor (and means a count in
Megatron and HAL), its validator refuses the layout BSH (HAL runs it), `no_load_rng` defaults to True there, Ulysses is
its default of context parallelism, and two of its names differ between its documents and its code (both are taken).
"""

from __future__ import annotations

import json
from typing import Any

from .rules import MICROBATCHES, Reading, Rule, int_of, kept, noted, only, scaled, take, to

SECTIONS = ("training_config", "parallel_config", "model_config", "dataset_config", "optimizer_config")

_PROFILER = noted("it belongs to the profiler, which is off", False)
_FUSED = noted("which kernels are fused is the backend's choice; --pin names one")
PRECISIONS = {
    word: {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    for dtype, words in (("float32", ("fp32",)), ("bfloat16", ("bf16",)), ("float16", ("fp16",)))
    for word in (dtype, *words)
}
POSITIONS = {word: {"position_embedding_type": word} for word in ("rope", "learned_absolute", "none")}
NORMS = {prefix + kind: {"normalization": kind} for prefix in ("", "Fused") for kind in ("LayerNorm", "RMSNorm")}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {"swiglu": True},
    "geglu": {"geglu": True},
    "gelu": {"gelu_approximate": "tanh"},
    "fast_gelu": {"gelu_approximate": "fast"},
}

TABLE: list[tuple[str, str, Rule]] = [
    ("padded_vocab_size", "model_config.vocab_size", to("pad_vocab_size_to")),
    ("hidden_size", "model_config.hidden_size", to("hidden_size")),
    ("seq_length", "model_config.seq_length", to("seq_length")),
    ("rotary_base", "model_config.rotary_base", to("rotary_base")),
    ("num_layers", "model_config.num_layers", to("num_layers")),
    (
        "position_embedding_type",
        "model_config.position_embedding_type",
        scaled("position_embedding_type", {**POSITIONS, "absolute": POSITIONS["learned_absolute"]}),
    ),
    (
        "use_rotary_position_embeddings",
        "model_config.use_rotary_embedding",
        scaled("position_embedding_type", {True: POSITIONS["rope"], False: {}}),
    ),
    ("init_method_std", "model_config.init_method_std", to("init_method_std")),
    ("normalization", "model_config.normalization", scaled("normalization", NORMS)),
    ("norm_epsilon", "model_config.norm_epsilon", to("norm_epsilon")),
    ("group_query_attention", "model_config.group_query_attention", kept("gqa")),
    ("num_attention_heads", "model_config.num_attention_heads", to("num_attention_heads")),
    ("num_query_groups", "model_config.num_query_groups", to("num_query_groups")),
    ("attention_dropout", "model_config.attention_dropout_rate", to("attention_dropout")),
    ("ffn_hidden_size", "model_config.ffn_hidden_size", to("ffn_hidden_size")),
    ("hidden_dropout", "model_config.hidden_dropout_rate", to("hidden_dropout")),
    (
        "attention_softmax_in_fp32",
        "model_config.attention_softmax_in_fp32",
        noted("softmax is always computed in float32", True),
    ),
    ("use_flash_attn", "model_config.use_flash_attention", to("use_flash_attn")),
    (
        "untie_embeddings_and_output_weights",
        "model_config.untie_embeddings_and_output_weights",
        to("untie_embeddings_and_output_weights"),
    ),
    ("transformer_impl", "model_config.transformer_impl", noted("--backend and --pin choose what runs", "local")),
    ("recompute_granularity", "model_config.recompute_granularity", to("recompute_granularity")),
    ("recompute_method", "model_config.recompute_method", to("recompute_method")),
    ("recompute_num_layers", "model_config.recompute_num_layers", to("recompute_num_layers")),
    (
        "fp16_lm_cross_entropy",
        "model_config.fp16_lm_cross_entropy",
        only(False, why="the loss is always computed in float32"),
    ),
    (
        "fp32_residual_connection",
        "model_config.fp32_residual_connection",
        only(False, why="the residual stream has the model's dtype"),
    ),
    ("add_qkv_bias", "model_config.qkv_has_bias", kept("qkv_bias")),
    ("add_dense_bias", "model_config.out_proj_has_bias", kept("proj_bias")),
    ("add_bias_linear", "model_config.add_bias_linear", kept("linear_bias")),
    ("use_sandwich_norm", "model_config.use_sandwich_norm", to("use_sandwich_norm")),
    ("pre_tockens", "model_config.fa_config.pre_tokens", to("pre_tokens")),
    ("next_tockens", "model_config.fa_config.next_tokens", to("next_tokens")),
    ("shape_order", "model_config.fa_config.input_layout", to("shape_order")),
    ("attn_post_norm_scale", "model_config.attn_post_norm_scale", to("attn_post_norm_scale")),
    ("ffn_post_norm_scale", "model_config.ffn_post_norm_scale", to("ffn_post_norm_scale")),
    ("params_dtype", "model_config.params_dtype", kept("params_dtype")),
    ("compute_dtype", "model_config.compute_dtype", scaled("bf16", PRECISIONS)),
    (
        "embedding_dtype",
        "model_config.embedding_init_dtype",
        noted("weights are drawn in float32 and rounded to the model's dtype", "float32", "fp32"),
    ),
    ("use_fused_swiglu", "model_config.apply_swiglu_fusion", _FUSED),
    ("apply_rope_fusion", "model_config.apply_rope_fusion", _FUSED),
    ("hidden_act", "model_config.hidden_act", scaled("swiglu", ACTIVATIONS)),
    ("seed", "training_config.seed", to("seed")),
    ("log_interval", "training_config.log_interval", to("log_interval")),
    ("train_iters", "training_config.training_iters", to("train_iters")),
    ("save_interval", "training_config.save_interval", to("save_interval")),
    ("eval_interval", "training_config.eval_interval", to("eval_interval")),
    (
        "accumulate_allreduce_grads_in_fp32",
        "training_config.accumulate_allreduce_grads_in_fp32",
        noted("gradients are always summed in float32", True),
    ),
    ("clip_grad", "optimizer_config.clip_grad", to("clip_grad")),
    ("bf16", "training_config.bf16", to("bf16")),
    ("fp16", "training_config.fp16", to("fp16")),
    ("loss_scale", "training_config.loss_scale", to("loss_scale")),
    ("initial_loss_scale", "training_config.loss_scale_value", to("initial_loss_scale")),
    ("loss_scale_window", "training_config.loss_scale_window", to("loss_scale_window")),
    (
        "hysteresis",
        "training_config.loss_scale_factor",
        only(
            2,
            2.0,
            why="it is the factor by which the loss scale changes, which is 2 here. MindSpeed-Core-MS fills it from "
            "Megatron's hysteresis, which counts overflows; give that as --hysteresis",
        ),
    ),
    ("use_distributed_optimizer", "training_config.use_distributed_optimizer", to("use_distributed_optimizer")),
    ("resume_training", "training_config.resume_training", kept("resume")),
    ("resume_crc_check", "training_config.crc_check", noted("checksums are always verified", True)),
    ("load", "training_config.load_checkpoint", to("load")),
    ("save", "training_config.output_dir", to("save")),
    ("ckpt_prefix", "training_config.prefix", noted("checkpoints have Megatron's names", "network")),
    ("ckpt_format", "training_config.ckpt_format", noted("`hal convert` reads and writes other formats", "torch_dist")),
    ("keep_checkpoint_max", "training_config.keep_checkpoint_max", to("keep_checkpoint_max")),
    ("wrap_with_ddp", "training_config.wrap_with_ddp", noted("gradients are always reduced in buckets", True)),
    ("bucket_size", "training_config.bucket_size", to("ddp_bucket_size")),
    ("enable_mem_align", "training_config.enable_mem_align", noted("how buckets lie in memory is the backend's part")),
    ("overlap_grad_reduce", "training_config.overlap_grad_reduce", to("overlap_grad_reduce")),
    (
        "delay_grad_reduce",
        "training_config.delay_grad_reduce",
        noted("gradients are reduced when the last microbatch makes them", False),
    ),
    ("no_load_optim", "training_config.no_load_optim", to("no_load_optim")),
    ("no_load_rng", "training_config.no_load_rng", to("no_load_rng")),
    (
        "new_dataset",
        "training_config.new_dataset",
        only(False, why="a run continues where it stopped in its data; --finetune begins anew with loaded weights"),
    ),
    ("profile", "training_config.profile", only(False, why="there is no profiler option; backends name their ranges")),
    *(
        (f"profile_{name}", f"training_config.profile_{key}", _PROFILER)
        for name, key in (
            ("save_path", "save_path"),
            ("step_start", "step_start"),
            ("step_end", "step_end"),
            ("level", "level"),
            ("with_stack", "with_stack"),
            ("with_memory", "memory"),
            ("framework", "framework"),
            ("communication", "communication"),
            ("parallel_strategy", "parallel_strategy"),
            ("aicore_metrics", "aicore_metrics"),
            ("l2_cache", "l2_cache"),
            ("hbm_ddr", "hbm_ddr"),
            ("pcie", "pcie"),
            ("data_process", "data_process"),
            ("data_simplification", "data_simplification"),
            ("op_time", "op_time"),
            ("offline_analyse", "offline_analyse"),
            ("dynamic_profiler_config_path", "dynamic_profiler_config_path"),
        )
    ),
    ("reset_attention_mask", "dataset_config.reset_attention_mask", to("reset_attention_mask")),
    ("reset_position_ids", "dataset_config.reset_position_ids", to("reset_position_ids")),
    ("eod_mask_loss", "dataset_config.eod_mask_loss", to("eod_mask_loss")),
    ("pad_token_id", "dataset_config.pad_token_id", noted("samples are never padded")),
    (
        "eos_token_id",
        "dataset_config.eos_token_id",
        only(why="the tokenizer says which id ends a document (--tokenizer-type); remove the key"),
    ),
    (
        "drop_remainder",
        "dataset_config.drop_remainder",
        only(True, why="a step always has a whole batch: samples repeat when they run out"),
    ),
    ("micro_batch_size", "dataset_config.batch_size", to("micro_batch_size")),
    ("micro_batch_num", "dataset_config.micro_batch_num", to(MICROBATCHES)),
    (
        "optimizer",
        "optimizer_config.optimizer_type",
        only("AdamW", "SpeedAdamW", "FusedAdamW", "mint.AdamW", "adam", why="the optimizer is AdamW"),
    ),
    ("adam_beta1", "optimizer_config.betas", kept("betas")),
    ("adam_beta2", "optimizer_config.betas", kept("betas")),
    ("adam_eps", "optimizer_config.eps", to("adam_eps")),
    ("lr_decay_style", "optimizer_config.lr_decay_style", to("lr_decay_style")),
    ("lr", "optimizer_config.learning_rate", to("lr")),
    ("min_lr", "optimizer_config.min_lr", to("min_lr")),
    ("lr_warmup_iters", "optimizer_config.lr_warmup_iters", to("lr_warmup_iters")),
    ("lr_decay_iters", "optimizer_config.lr_decay_iters", to("lr_decay_iters")),
    (
        "use_checkpoint_opt_param_scheduler",
        "optimizer_config.use_checkpoint_opt_param_scheduler",
        only(False, why="the schedule is the configuration's; give the options the checkpoint was made with"),
    ),
    (
        "override_opt_param_scheduler",
        "optimizer_config.override_opt_param_scheduler",
        noted("the schedule is always the configuration's", True),
    ),
    ("weight_decay", "optimizer_config.weight_decay", to("weight_decay")),
    (
        "overlap_param_gather",
        "optimizer_config.overlap_param_gather",
        noted("parameters are gathered layer by layer ahead of their use", True),
    ),
    ("start_weight_decay", "optimizer_config.start_weight_decay", to("weight_decay")),
    ("end_weight_decay", "optimizer_config.end_weight_decay", to("weight_decay")),
    (
        "weight_decay_incr_style",
        "optimizer_config.weight_decay_incr_style",
        only("constant", why="weight decay does not change during a run"),
    ),
    (
        "no_weight_decay_params",
        "optimizer_config.no_weight_decay_params",
        only([], why="biases and one-dimensional parameters have no weight decay, all others do"),
    ),
    ("tensor_model_parallel_size", "parallel_config.tensor_model_parallel_size", to("tensor_model_parallel_size")),
    ("context_parallel_size", "parallel_config.context_parallel_size", to("context_parallel_size")),
    (
        "context_parallel_algo",
        "parallel_config.context_parallel_algo",
        scaled(
            "context_parallel_algo",
            {
                "ulysses_cp_algo": {"context_parallel_algo": "ulysses"},
                "megatron_cp_algo": {"context_parallel_algo": "ring"},
            },
        ),
    ),
    (
        "ulysses_degree_in_cp",
        "parallel_config.ulysses_degree_in_cp",
        only(why="it belongs to hybrid_cp_algo; context parallelism is Ulysses or ring here, not both"),
    ),
    ("expert_model_parallel_size", "parallel_config.expert_model_parallel_size", to("expert_model_parallel_size")),
    (
        "virtual_pipeline_model_parallel_size_ms",
        "parallel_config.virtual_pipeline_model_parallel_size",
        kept("virtual"),
    ),
    (
        "num_layers_per_virtual_pipeline_stage",
        "parallel_config.num_layers_per_virtual_pipeline_stage",
        to("num_layers_per_virtual_pipeline_stage"),
    ),
    ("sequence_parallel", "parallel_config.sequence_parallel", to("sequence_parallel")),
    (
        "pipeline_model_parallel_size",
        "parallel_config.pipeline_model_parallel_size",
        to("pipeline_model_parallel_size"),
    ),
    ("num_layer_list", "parallel_config.num_layer_list", kept("layer_list")),
    (
        "recompute",
        "parallel_config.recompute",
        scaled(
            "recompute_granularity",
            {
                False: {},
                True: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            },
        ),
    ),
    (
        "select_recompute",
        "parallel_config.select_recompute",
        scaled("recompute_granularity", {False: {}, True: {"recompute_granularity": "selective"}}),
    ),
    (
        "select_comm_recompute",
        "parallel_config.select_comm_recompute",
        only(False, why="communication is not recomputed"),
    ),
]
"""(Megatron's argument, key, what it means here). The profiler's memory key has the name of the documents, not of the
code, since that is the key; the argument of the virtual pipeline has the code's."""

RULES = {key: rule for _, key, rule in TABLE}


def finish(reading: Reading) -> None:
    """What follows from several keys together, and the defaults that differ from HAL's."""
    values = reading.values
    betas, key = take(reading, "betas")
    if key:
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise reading.refuse(key, f"two numbers; found {betas!r}")
        for option, beta in zip(("adam_beta1", "adam_beta2"), betas):
            reading.set(option, beta, key)
    grouped, key = take(reading, "gqa")
    if grouped is True and "num_query_groups" not in values:
        raise reading.refuse(key, "needs model_config.num_query_groups")
    if grouped is False and values.get("num_query_groups", values.get("num_attention_heads")) != values.get(
        "num_attention_heads"
    ):
        raise reading.refuse(key, f"False, but num_query_groups is {values['num_query_groups']}; remove one of them")
    params, key = take(reading, "params_dtype")
    computed = "bfloat16" if values.get("bf16") else "float16" if values.get("fp16") else "float32"
    if key and params not in ("float32", "fp32", computed):
        raise reading.refuse(key, f"{params!r}, but the model computes in {computed}; masters are float32 always")
    resume, key = take(reading, "resume")
    if resume is True and "load" not in values:
        raise reading.refuse(key, "needs training_config.load_checkpoint")
    if resume is False and "load" in values:
        reading.set("finetune", True, key)
    if "load" in values and "no_load_rng" not in values:
        reading.note("training_config.no_load_rng", "False, as in Megatron; MindSpeed-Core-MS would take True")
    if values.get("context_parallel_size", 1) > 1 and "context_parallel_algo" not in values:
        reading.set("context_parallel_algo", "ulysses", "parallel_config.context_parallel_algo (MindSpeed's default)")
    biases(reading)
    pipeline(reading)


def biases(reading: Reading) -> None:
    """Biases of QKV, projection and MLP: HAL has them in all linear layers, in none, or in QKV only."""
    linear, linear_key = take(reading, "linear_bias")
    given = [(linear, linear_key), take(reading, "qkv_bias"), take(reading, "proj_bias")]
    for value, key in given:
        if key and not isinstance(value, bool):
            raise reading.refuse(key, f"True or False; found {value!r}")
    if not any(key for _, key in given):
        return
    everywhere = True if linear is None else linear
    qkv, projection = (everywhere if value is None else value for value, _ in given[1:])
    last = next(key for _, key in reversed(given) if key)
    if (qkv, projection, everywhere) == (True, True, True):
        reading.set("disable_bias_linear", False, last)
    elif not projection and not everywhere:
        reading.set("disable_bias_linear", True, last)
        reading.set("add_qkv_bias", qkv, last)
    else:
        raise reading.refuse(
            last,
            f"biases are in all linear layers, in none, or in QKV only; asked for QKV {qkv}, projection {projection}, "
            f"MLP {everywhere}",
        )


def pipeline(reading: Reading) -> None:
    """Virtual stages and the list of layers, which may be per stage, or per stage and virtual stage."""
    values = reading.values
    virtual, virtual_key = take(reading, "virtual")
    layers, layers_key = take(reading, "layer_list")
    stages = values.get("pipeline_model_parallel_size", 1)
    if layers_key:
        _layer_list(reading, layers_key, layers, stages)
    if virtual is not None and int_of(virtual, f"{reading.file}: {virtual_key}") > 1:
        count = values.get("num_layers")
        if count is None or count % (stages * virtual):
            raise reading.refuse(virtual_key, f"{virtual} virtual stages of {stages} do not divide {count} layers")
        reading.set("num_layers_per_virtual_pipeline_stage", count // (stages * virtual), virtual_key)


def _layer_list(reading: Reading, key: str, given: Any, stages: int) -> None:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise reading.refuse(key, f"lists of numbers; found {given!r}") from None
    rows = given if isinstance(given, list) and given and all(isinstance(row, list) for row in given) else [given]
    if not all(isinstance(r, list) and r and all(type(n) is int and n >= 0 for n in r) for r in rows):
        raise reading.refuse(key, f"lists of numbers of layers; found {given!r}")
    flat = [n for row in rows for n in row]
    total, told = sum(flat), reading.values.get("num_layers")
    if told is not None and told != total:
        raise reading.refuse(key, f"its {total} layers are not the {told} of num_layers")
    if rows[0] is given:
        reading.set("num_layer_list", [str(n) for n in flat], key)
        return
    if len(rows) != stages or len({len(row) for row in rows}) != 1:
        raise reading.refuse(key, f"{len(rows)} rows of {sorted({len(r) for r in rows})} for {stages} stages")
    # Equal but for the end: the same split of a model whose last layers only fill their places.
    full = flat[0]
    missing = full * len(flat) - total
    if any(n != full for n in flat[:-1]) or not 0 <= missing < full:
        raise reading.refuse(key, "virtual stages have equal numbers of layers, of which the last may have fewer")
    reading.values.pop("num_layers", None)
    reading.set("num_layers", total + missing, key)
    reading.set("num_layers_per_virtual_pipeline_stage", full, key)
    if missing:
        reading.set("noop_layers", [str(n) for n in range(total, total + missing)], key)
        reading.note(key, f"{total} layers in {total + missing} places, of which the last {missing} stay empty")
