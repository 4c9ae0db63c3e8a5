"""Validation of a configuration before anything starts: one line per problem, with what to change.

There are two kinds of problems: contradictions, and data that were given but would be ignored. Other options that have
no effect become notes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields

from . import experts, latent, linear_attention, recomputation
from .experts import layer_pattern
from .parallel_layout import problems, ranks_of_replica
from .sample_schedule import full_batch_size, learning_rate_samples, valid_batches, valid_ramp
from .schema import BOUNDS, Config, ConfigError, report
from .tokenizer_options import OPTIONS, missing_options, readers


def check(config: Config) -> None:
    """Raises ConfigError with all problems."""
    _require(config, *_ALONE, lacking, _ignored, _parallel)


def check_given(config: Config) -> None:
    """Validates a configuration that is only displayed: missing options and processes are allowed."""
    known = processes_given(config)
    _require(config, *_ALONE, _ignored, lambda c: problems(c, world_size(c) + missing_processes(c), idle=known))


def check_model(config: Config) -> None:
    """Raises ConfigError with the problems of the options of the model itself."""
    _require(config, _bounds, _split, _shape, latent.problems, linear_attention.problems, experts.problems)


def evaluates(c: Config) -> bool:
    """Whether the run evaluates at all. As in Megatron, a split without validation data means that it does not."""
    proportions = split_proportions(c.split)
    none = len(proportions) == 3 and proportions[1] == 0 and not c.train_data_path
    return c.eval_interval is not None and c.eval_iters > 0 and not none


def lacking(c: Config) -> Iterator[str]:
    """Options that a run needs and that were not given."""
    missing = missing_options(c)
    if missing is not None:
        yield missing
    if c.sft and not (c.data_path or c.train_data_path):
        yield "--sft needs examples; give a file of JSON lines with --data-path"
    if c.tokenizer_type == "NullTokenizer" and not (c.data_path or c.train_data_path or c.mock_data):
        yield "--tokenizer-type NullTokenizer cannot read text; give --data-path, or another tokenizer"


def processes_given(c: Config) -> bool:
    """Whether the number of processes was given, by a launcher or --nproc-per-node."""
    return "WORLD_SIZE" in os.environ or "nproc_per_node" in c.given


def missing_processes(c: Config) -> int:
    """The number of additional processes that one replica needs, if the number of processes was not given."""
    return 0 if processes_given(c) else max(0, ranks_of_replica(c) - world_size(c))


def _require(config: Config, *rules: Callable[[Config], Iterator[str]]) -> None:
    """Raises ConfigError with the problems that the rules find.

    The first rule checks bounds; later rules divide by numbers that are within them. A rule may also rely on what it
    has checked itself before, so what it raises after a problem ends it.
    """
    problems: list[str] = []
    for rule in rules:
        before = len(problems)
        try:
            for problem in rule(config):
                problems.append(problem)
        except (ValueError, ZeroDivisionError, IndexError):
            if len(problems) == before:
                raise
        if rule is _bounds and problems:
            break
    if problems:
        raise report([ConfigError(problem) for problem in problems])


def _bounds(c: Config) -> Iterator[str]:
    # A derived value is out of bounds because another value is; that one is reported.
    derived = {f.name for f in fields(c) if f.metadata.get("rule") and f.name not in c.given}
    problems = list(_out_of_bounds(c, {f.name for f in fields(c)} - derived))
    yield from problems or _out_of_bounds(c, derived)


def _out_of_bounds(c: Config, names: set[str]) -> Iterator[str]:
    for option in (f for f in fields(c) if f.name in names):
        bounds, value = option.metadata.get("bounds", "any integer"), getattr(c, option.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        finite = isinstance(value, int) or (number and math.isfinite(value))
        if number and not (finite and BOUNDS[bounds](value)):
            yield f"{_flag(option.name)} must be {bounds}; found {value}"


def split_proportions(text: str) -> list[float]:
    """The numbers in a --split such as 969,30,1, by Megatron's rule: quotes and spaces do not count."""
    words = re.sub(r"['\"\s]", "", text).split(",")
    numbers = all(re.fullmatch(r"\d+\.?\d*|\.\d+", word) for word in words)
    return [float(word) for word in words] if numbers else []


def _split(c: Config) -> Iterator[str]:
    proportions = split_proportions(c.split)
    if len(proportions) != 3 or not all(0 <= p < math.inf for p in proportions) or proportions[0] <= 0:
        yield f"--split must be three proportions such as 969,30,1, the first above 0; found {c.split!r}"


def _shape(c: Config) -> Iterator[str]:
    own_size = "kv_channels" in c.given or c.multi_latent_attention
    if c.hidden_size % c.num_attention_heads and not own_size:
        yield (
            f"--hidden-size {c.hidden_size} is not divisible by --num-attention-heads {c.num_attention_heads}; "
            f"change one, or give the head size with --kv-channels"
        )
    if c.num_attention_heads % c.num_query_groups:
        yield (
            f"--num-attention-heads {c.num_attention_heads} is not divisible by --num-query-groups {c.num_query_groups}"
        )
    if c.seq_length > c.max_position_embeddings:
        yield (
            f"--seq-length {c.seq_length} is longer than --max-position-embeddings {c.max_position_embeddings}; "
            f"raise the latter or shorten the sequence"
        )
    activations = [name for name in ("swiglu", "geglu", "squared_relu") if getattr(c, name)]
    if len(activations) > 1:
        yield f"{' and '.join(map(_flag, activations))} contradict each other; give one"
    channels = c.qk_pos_emb_head_dim if c.multi_latent_attention else c.kv_channels
    if c.rotates and int(channels * c.rotary_percent) < 2:
        yield f"rotary positions need at least two channels per head; the head size is {channels}"
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        try:
            if getattr(c, name) is not None:
                layer_pattern(getattr(c, name), c.num_layers)
        except ValueError as error:
            yield f"{_flag(name)}: {error}"
    if c.attn_logit_softcapping is not None and c.ring_degree > 1:
        yield (
            f"--context-parallel-algo {c.context_parallel_algo} computes gradients block by block, which "
            "--attn-logit-softcapping prevents; give --context-parallel-algo ulysses"
        )
    if c.fuses_output_layer and (c.output_logit_softcapping is not None or c.output_multiplier_scale != 1.0):
        yield (
            "--cross-entropy-fusion-impl linear computes the loss without logits, which --output-logit-softcapping and "
            "--output-multiplier-scale change; remove it, or these"
        )
    if c.pre_tokens is not None and c.window[1] + c.pre_tokens < 0:
        yield f"--pre-tokens {c.pre_tokens} with --next-tokens {c.window[1]} leaves no key visible to any query"


def _batch(c: Config) -> Iterator[str]:
    if c.fp16 and c.bf16:
        yield "--fp16 and --bf16 contradict each other; give one"
    if c.rampup_batch_size and not valid_ramp(c.rampup_batch_size, c.global_batch_size):
        yield (
            f"--rampup-batch-size {' '.join(c.rampup_batch_size)} must be START INCREMENT SAMPLES, and "
            f"increments lead from START to --global-batch-size {c.global_batch_size}"
        )
    elif not valid_batches(c):
        yield (
            f"--step-batch-size-schedule {' '.join(c.step_batch_size_schedule)} must be TOKENS:SIZE ..., with "
            "ascending numbers of tokens of which the first is 0, such as 0:768 250B:1536"
        )
    elif c.step_batch_size_schedule:
        yield from _batch_steps(c)


def _batch_steps(c: Config) -> Iterator[str]:
    if c.rampup_batch_size:
        yield "--step-batch-size-schedule and --rampup-batch-size contradict each other; give one"
    if c.global_batch_size != full_batch_size(c):
        yield (
            f"--global-batch-size {c.global_batch_size} contradicts --step-batch-size-schedule, which ends with "
            f"{full_batch_size(c)}; remove one of them"
        )
    if c.train_samples is None and "global_batch_size" not in c.given:
        yield (
            "--step-batch-size-schedule needs --train-samples: Megatron counts --lr-decay-iters in sequences, and "
            "with --train-iters by a batch that depends on the number of processes; give --train-samples, or "
            f"--global-batch-size {full_batch_size(c)} to count by that"
        )


def _learning_rate(c: Config) -> Iterator[str]:
    if c.min_lr > c.lr:
        yield f"--min-lr {c.min_lr} is above --lr {c.lr}"
    if c.lr_warmup_init > c.lr:
        yield f"--lr-warmup-init {c.lr_warmup_init} is above --lr {c.lr}"
    if {"lr_warmup_fraction", "lr_warmup_iters"} <= c.given:
        yield "--lr-warmup-fraction and --lr-warmup-iters contradict each other; give one"
    in_samples, unit = c.train_samples is not None, "samples" if c.train_samples is not None else "iters"
    if in_samples:
        for name in ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"):
            if name in c.given and getattr(c, name):
                yield f"{_flag(name)} contradicts --train-samples; give {_flag(name).replace('iters', 'samples')}"
    if c.counts_epochs and not c.epoch_sequences:
        return  # the length of the run is known, and checked, when the data are open
    warmup, decay, wsd = (number if in_samples else number / c.global_batch_size for number in learning_rate_samples(c))
    if warmup >= decay:
        yield f"--lr-warmup-{unit} {warmup:g} must be below the {decay:g} {unit} of the decay"
    if c.lr_decay_style == "WSD":
        if not wsd:
            yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
        elif wsd + warmup > decay:
            yield f"--lr-wsd-decay-{unit} {wsd:g} and --lr-warmup-{unit} {warmup:g} do not fit in {decay:g} {unit}"
    if c.decoupled_lr is not None and (c.decoupled_min_lr or 0.0) > c.decoupled_lr:
        yield f"--decoupled-min-lr {c.decoupled_min_lr} is above --decoupled-lr {c.decoupled_lr}"
    if c.weight_decay_incr_style != "constant" and None in (c.start_weight_decay, c.end_weight_decay):
        yield (
            f"--weight-decay-incr-style {c.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay"
        )


def _data_sources(c: Config) -> Iterator[str]:
    names = ("data_path", "text_file", "train_data_path", "mock_data")
    given = [_flag(name) for name in names if getattr(c, name)]
    if len(given) > 1:
        yield f"{given[0]} and {given[1]} contradict each other; give one"
    if c.sft and (c.text_file or c.mock_data):
        yield f"--sft and {'--text-file' if c.text_file else '--mock-data'} contradict each other; give --data-path"
    if c.fim_data and (c.sft or c.mock_data):
        yield f"--fim-data and {'--sft' if c.sft else '--mock-data'} contradict each other; give one"
    if c.fim_data and c.fim_split_sample is not None and c.fim_fragment_rate is None:
        yield "--fim-split-sample needs --fim-fragment-rate, the probability that a fragment is rearranged"
    if c.num_train_epochs is not None:
        for name in ("train_iters", "train_samples"):
            if name in c.given and getattr(c, name) is not None:
                yield f"--num-train-epochs and {_flag(name)} contradict each other; give one"
    if evaluates(c) and c.train_data_path and not c.valid_data_path:
        yield "--eval-interval needs validation data; give --valid-data-path beside --train-data-path"


def _pins(c: Config) -> Iterator[str]:
    for pin in c.pin:
        if "=" not in pin:
            yield f"--pin is OP=IMPLEMENTATION, e.g. flash_attention=cpu_ref/c; found {pin!r}"


def _profile(c: Config) -> Iterator[str]:
    """Contradictions between the options of --profile."""
    if not c.profile:
        return
    if c.profile_step_end <= c.profile_step_start:
        yield (
            f"--profile-step-end {c.profile_step_end} must be above --profile-step-start {c.profile_step_start}, the "
            "step after which profiling starts"
        )
    elif c.profile_step_start >= c.train_iters:
        yield (
            f"--profile-step-start {c.profile_step_start} leaves nothing to profile of --train-iters {c.train_iters}; "
            "the default is 10"
        )
    ranks = [rank for rank in c.profile_ranks if not (rank.isdecimal() and int(rank) < world_size(c))]
    if ranks and processes_given(c):
        yield f"--profile-ranks {' '.join(ranks)}: this run has ranks 0 to {world_size(c) - 1}"
    if c.verify_ops:
        yield "--profile would measure the float64 references of --verify-ops; give one of them"


def _float8(c: Config) -> Iterator[str]:
    if c.fp8_format is None:
        return
    if not c.bf16:
        yield f"--fp8-format {c.fp8_format} needs --bf16: weights and activations between products have that dtype"
    if c.fp8_recipe == "delayed" and c.num_experts is not None:
        yield (
            "--fp8-recipe delayed has no histories of single experts, some of which get no tokens in an iteration; "
            "with --num-experts, give --fp8-recipe tensorwise or blockwise"
        )
    if c.fp8_recipe == "delayed" and c.first_last_layers_bf16:
        yield "--fp8-recipe delayed does not go with --first-last-layers-bf16, as in Megatron; remove one of them"


def _cuda_graphs(c: Config) -> Iterator[str]:
    """Why the steps of a run are not repetitions of one recorded step, which --cuda-graphs needs."""
    if not c.cuda_graphs:
        return
    changes = {
        "several processes": world_size(c) > 1,
        "--attention-dropout and --hidden-dropout above 0": c.attention_dropout > 0.0 or c.hidden_dropout > 0.0,
        "--num-experts": c.num_experts is not None,
        "--reset-position-ids, --reset-attention-mask or --sft": c.has_documents,
        "--rampup-batch-size": bool(c.rampup_batch_size),
        "--step-batch-size-schedule": bool(c.step_batch_size_schedule),
        "--fp16": c.fp16,
        "--rerun-mode validate_results": c.rerun_mode != "disabled",
        "--verify-ops": c.verify_ops > 0.0,
        "--checkpoint-in-cpu": c.checkpoint_in_cpu,
    }
    refused = ", ".join(name for name, applies in changes.items() if applies)
    if refused:
        yield (
            "--cuda-graphs repeats one recorded step, so the host may not decide, draw, count or wait within it, and "
            f"shapes may not change. Remove it, or: {refused}"
        )


_ALONE = (
    _bounds,
    _cuda_graphs,
    _float8,
    _split,
    _shape,
    latent.problems,
    linear_attention.problems,
    experts.problems,
    experts.training_problems,
    _batch,
    _learning_rate,
    recomputation.problems,
    _data_sources,
    _pins,
    _profile,
)
"""Rules that depend on the options only, not on the number of processes."""


def _ignored(c: Config) -> Iterator[str]:
    """Given options about data and tokenizers that would have no effect, so that the run would train on others."""
    rules = [
        *((n, used, needs) for n, used, needs in _tokenizer_rules(c) if n != "vocab_size"),
        ("split", not c.train_data_path, "data that all splits share, not --train-data-path"),
        ("valid_data_path test_data_path", bool(c.train_data_path), "--train-data-path"),
        ("valid_data_path", c.eval_interval is not None, "--eval-interval"),
        ("fp8_recipe", c.fp8_format is not None, "--fp8-format"),
        ("chat_template packing truncation num_train_epochs", c.sft, "--sft"),
        (
            "reset_position_ids",
            c.rotates or c.position_embedding_type != "none",
            "a --position-embedding-type other than none",
        ),
        ("lr_decay_samples lr_warmup_samples lr_wsd_decay_samples", c.train_samples is not None, "--train-samples"),
        (
            "start_weight_decay end_weight_decay",
            c.weight_decay_incr_style != "constant",
            "--weight-decay-incr-style linear or cosine",
        ),
    ]
    for name, reader in _unread(c, rules):
        yield f"{_flag(name)} would be ignored: it needs {reader}. Remove it, or add that"


def _logging_rules(c: Config) -> Iterator[tuple[str, bool, str]]:
    """Rows for `idle`, about profiles and timers."""
    yield "profile_step_start profile_step_end profile_ranks use_pytorch_profiler", c.profile, "--profile"
    yield "record_memory_history", c.profile, "--profile"
    yield "memory_snapshot_path", c.profile and c.record_memory_history, "--profile and --record-memory-history"
    yield "timing_log_option log_timers_to_tensorboard", c.timing_log_level > 0, "--timing-log-level above 0"
    yield "straggler_minmax_count", c.log_straggler, "--log-straggler"


def idle(c: Config) -> Iterator[str]:
    """Notes about given options that have no effect beside the others, which is common in the files of other trainers.

    Each row: option names, whether the run reads them, what would read them.
    """
    full = c.recompute_granularity == "full"
    rope, dynamic = c.rotates, c.fp16 and c.loss_scale is None
    wsd, ramp = c.lr_decay_style == "WSD", c.weight_decay_incr_style != "constant"
    rules = [
        (
            "rotary_base rotary_percent rotary_interleaved use_rope_scaling no_rope_freq",
            rope,
            "--position-embedding-type rope",
        ),
        *latent.readers(c),
        *linear_attention.readers(c),
        (
            "fim_rate fim_spm_rate fim_split_sample fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token "
            "fim_pad_token fim_eod_token",
            c.fim_data,
            "--fim-data",
        ),
        ("fim_fragment_rate", c.fim_data and c.fim_split_sample is not None, "--fim-data and --fim-split-sample"),
        ("gelu_approximate", not (c.swiglu or c.squared_relu), "a gelu or geglu MLP"),
        (
            "add_qkv_bias add_dense_bias add_mlp_bias",
            c.disable_bias_linear or c.multi_latent_attention,
            "--disable-bias-linear (all biases are on)",
        ),
        ("reset_position_ids reset_attention_mask eod_mask_loss", not c.sft, "data other than those of --sft"),
        ("attn_post_norm_scale ffn_post_norm_scale", c.use_sandwich_norm, "--use-sandwich-norm"),
        ("window_attn_skip_freq", c.window != (None, 0), "a window: --pre-tokens or --next-tokens"),
        ("softmax_scale", not c.multi_latent_attention, "attention without --multi-latent-attention"),
        ("shape_order", c.use_flash_attn, "flash attention, not --no-flash-attn"),
        ("min_lr lr_decay_iters", c.lr_decay_style != "constant", "a --lr-decay-style other than constant"),
        ("make_vocab_size_divisible_by", c.pad_vocab_size_to is None, "a vocabulary without --pad-vocab-size-to"),
        ("lr_warmup_init lr_warmup_style", learning_rate_samples(c)[0] > 0, "--lr-warmup-iters"),
        ("lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples", wsd, "--lr-decay-style WSD"),
        ("decoupled_min_lr", c.decoupled_lr is not None, "--decoupled-lr"),
        ("adam_eps_before_correction", c.adam_bias_correction, "bias correction, not --no-adam-bias-correction"),
        ("weight_decay", not ramp, "--weight-decay-incr-style constant"),
        ("rope_scaling_factor", c.use_rope_scaling, "--use-rope-scaling"),
        ("eval_interval", evaluates(c) or not c.eval_iters, "--split with validation data"),
        ("loss_scale", c.fp16, "--fp16"),
        ("fp32_residual_connection", c.fp16 or c.bf16, "--bf16 or --fp16"),
        ("first_last_layers_bf16", c.fp8_format is not None, "--fp8-format"),
        (
            "fp8_amax_history_len fp8_amax_compute_algo fp8_margin",
            c.fp8_format is not None and c.fp8_recipe == "delayed",
            "--fp8-format with --fp8-recipe delayed",
        ),
        ("num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", c.first_last_layers_bf16, "--first-last-layers-bf16"),
        ("initial_loss_scale min_loss_scale loss_scale_window hysteresis", dynamic, "--fp16 with a dynamic loss scale"),
        ("cross_entropy_fusion_impl", c.cross_entropy_loss_fusion, "--cross-entropy-loss-fusion"),
        ("recompute_method recompute_num_layers", full, "--recompute-granularity full"),
        ("checkpoint_in_cpu", full or bool(c.recompute_layer_list), "--recompute-granularity full"),
        (
            "partition_activations",
            (full or bool(c.recompute_layer_list)) and c.tensor_model_parallel_size > 1 and not c.sequence_parallel,
            "--recompute-granularity full and --tensor-model-parallel-size above 1 without --sequence-parallel",
        ),
        *((n, used, needs) for n, used, needs in _tokenizer_rules(c) if n == "vocab_size"),
        ("eval_iters eval_global_batch_size", c.eval_interval is not None, "--eval-interval"),
        ("wandb_exp_name", c.wandb_project is not None, "--wandb-project"),
        ("sample_temperature", c.sample_tokens > 0, "--sample-tokens above 0"),
        ("keep_checkpoint_max async_save", c.save is not None, "--save"),
        ("no_load_optim no_load_rng accept_changed_data new_dataset finetune", c.load is not None, "--load"),
        ("exit_on_missing_checkpoint", c.load is not None, "--load"),
        ("use_checkpoint_opt_param_scheduler", c.load is not None, "--load"),
        *_logging_rules(c),
        ("skip_bad_batches", c.rerun_mode != "disabled", "--rerun-mode validate_results"),
        ("context_parallel_algo", c.context_parallel_size > 1, "--context-parallel-size above 1"),
        ("ulysses_degree_in_cp", c.context_parallel_algo == "hybrid", "--context-parallel-algo hybrid"),
        (f"{experts.OPTIONS} expert_tensor_parallel_size", c.num_experts is not None, "--num-experts"),
        ("moe_aux_loss_coeff", "none" not in c.moe_router_load_balancing_type, "a --moe-router-load-balancing-type"),
        ("moe_router_bias_update_rate", c.moe_router_enable_expert_bias, "--moe-router-enable-expert-bias"),
        ("moe_router_num_groups", c.moe_router_group_topk is not None, "--moe-router-group-topk"),
        ("moe_router_pre_softmax", c.moe_router_score_function == "softmax", "--moe-router-score-function softmax"),
        ("moe_token_drop_policy", c.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor"),
    ]
    for name, reader in _unread(c, rules):
        yield f"{_flag(name)} {getattr(c, name)} has no effect: it needs {reader}"


def _unread(c: Config, rules: Iterable[tuple[str, bool, str]]) -> Iterator[tuple[str, str]]:
    """(option, what would read it) of the given options that the run does not read."""
    for names, is_read, reader in rules:
        for name in names.split():
            # False, None and () are the values of options that were not given; giving them explicitly is harmless.
            if name in c.given and not is_read and getattr(c, name) not in (False, None, ()):
                yield name, reader


def _tokenizer_rules(c: Config) -> Iterator[tuple[str, bool, str]]:
    for name in OPTIONS:
        yield name, c.tokenizer_type in readers(name), f"--tokenizer-type {' or '.join(readers(name))}"


def _parallel(c: Config) -> Iterator[str]:
    yield from problems(c, world_size(c))


def world_size(c: Config) -> int:
    """The number of processes of this job: WORLD_SIZE, which launchers set, or else --nproc-per-node."""
    return int(os.environ.get("WORLD_SIZE", c.nproc_per_node))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
