"""Validation of a configuration before anything starts: one line per problem, with what to change.

There are two kinds of problems: contradictions, and options that were given but would be ignored.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import chain

from .parallel_layout import problems
from .schema import BOUNDS, Config, ConfigError
from .tokenizer_options import OPTIONS, missing_options, readers


def check(config: Config) -> None:
    """Raises ConfigError with the first problem."""
    _require(config, *_ALONE, lacking, _ignored, _parallel)


def check_given(config: Config) -> None:
    """Validates a configuration that is only displayed: missing options and processes are allowed."""
    _require(config, *_ALONE, _ignored, lambda c: problems(c, world_size(c) + missing_processes(c)))


def check_model(config: Config) -> None:
    """Raises ConfigError with the first problem of the options of the model itself."""
    _require(config, _bounds, _split, _shape)


def lacking(c: Config) -> Iterator[str]:
    """Options that a run needs and that were not given."""
    missing = missing_options(c)
    if missing is not None:
        yield missing
    if c.tokenizer_type == "NullTokenizer" and not (c.data_path or c.train_data_path):
        yield "--tokenizer-type NullTokenizer cannot read text; give --data-path, or another tokenizer"


def missing_processes(c: Config) -> int:
    """The number of additional processes that one replica needs, if the number of processes was not given."""
    given = "WORLD_SIZE" in os.environ or "nproc_per_node" in c.given
    replica = c.tensor_model_parallel_size * c.pipeline_model_parallel_size * c.context_parallel_size
    return 0 if given else max(0, replica - world_size(c))


def _require(config: Config, *rules: Callable[[Config], Iterator[str]]) -> None:
    # Evaluated lazily, because later rules may divide by numbers whose bounds earlier rules check.
    for problem in chain.from_iterable(rule(config) for rule in rules):
        raise ConfigError(problem)


def _bounds(c: Config) -> Iterator[str]:
    for option in fields(c):
        bounds, value = option.metadata.get("bounds", "any integer"), getattr(c, option.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        finite = isinstance(value, int) or (number and math.isfinite(value))
        if number and not (finite and BOUNDS[bounds](value)):
            yield f"{_flag(option.name)} must be {bounds}; found {value}"


def _split(c: Config) -> Iterator[str]:
    try:
        proportions = [float(part) for part in c.split.split(",")]
    except ValueError:
        proportions = []
    if len(proportions) != 3 or not all(0 <= p < math.inf for p in proportions) or proportions[0] <= 0:
        yield f"--split must be three proportions such as 969,30,1, the first above 0; found {c.split!r}"
    elif c.eval_interval and proportions[1] == 0 and not c.train_data_path:
        yield f"--eval-interval needs validation data, but --split {c.split} has none"


def _shape(c: Config) -> Iterator[str]:
    if c.hidden_size % c.num_attention_heads and "kv_channels" not in c.given:
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
    if c.swiglu and c.geglu:
        yield "--swiglu and --geglu contradict each other; give one"
    if c.position_embedding_type == "rope" and int(c.kv_channels * c.rotary_percent) < 2:
        yield f"rotary positions need at least two channels per head; the head size is {c.kv_channels}"
    if c.pre_tokens is not None and c.window[1] + c.pre_tokens < 0:
        yield f"--pre-tokens {c.pre_tokens} with --next-tokens {c.window[1]} leaves no key visible to any query"


def _batch(c: Config) -> Iterator[str]:
    if c.fp16 and c.bf16:
        yield "--fp16 and --bf16 contradict each other; give one"
    if c.global_batch_size % c.micro_batch_size:
        yield f"--global-batch-size {c.global_batch_size} is not divisible by --micro-batch-size {c.micro_batch_size}"


def _learning_rate(c: Config) -> Iterator[str]:
    if c.min_lr > c.lr:
        yield f"--min-lr {c.min_lr} is above --lr {c.lr}"
    if c.lr_warmup_init > c.lr:
        yield f"--lr-warmup-init {c.lr_warmup_init} is above --lr {c.lr}"
    if {"lr_warmup_fraction", "lr_warmup_iters"} <= c.given:
        yield "--lr-warmup-fraction and --lr-warmup-iters contradict each other; give one"
    if c.lr_warmup_iters >= c.lr_decay_iters:
        yield f"--lr-warmup-iters {c.lr_warmup_iters} must be below the {c.lr_decay_iters} iterations of the decay"
    if c.lr_decay_style == "WSD":
        if c.lr_wsd_decay_iters is None:
            yield "--lr-decay-style WSD needs --lr-wsd-decay-iters"
        elif c.lr_wsd_decay_iters + c.lr_warmup_iters > c.lr_decay_iters:
            yield (
                f"--lr-wsd-decay-iters {c.lr_wsd_decay_iters} and --lr-warmup-iters {c.lr_warmup_iters} do not fit in "
                f"{c.lr_decay_iters} iterations"
            )


def _recomputation(c: Config) -> Iterator[str]:
    if c.recompute_granularity == "full" and c.recompute_method is None:
        yield "--recompute-granularity full needs --recompute-method uniform or block"
    if c.recompute_num_layers is not None and c.recompute_num_layers > c.num_layers:
        yield f"--recompute-num-layers {c.recompute_num_layers} exceeds --num-layers {c.num_layers}"


def _data_sources(c: Config) -> Iterator[str]:
    sources = {"--data-path": c.data_path, "--text-file": c.text_file, "--train-data-path": c.train_data_path}
    given = [name for name, value in sources.items() if value]
    if len(given) > 1:
        yield f"{given[0]} and {given[1]} contradict each other; give one"
    if c.eval_interval and c.train_data_path and not c.valid_data_path:
        yield "--eval-interval needs validation data; give --valid-data-path beside --train-data-path"


def _pins(c: Config) -> Iterator[str]:
    for pin in c.pin:
        if "=" not in pin:
            yield f"--pin is OP=IMPLEMENTATION, e.g. flash_attention=cpu_ref/c; found {pin!r}"


_ALONE = (_bounds, _split, _shape, _batch, _learning_rate, _recomputation, _data_sources, _pins)
"""Rules that depend on the options only, not on the number of processes."""


def _ignored(c: Config) -> Iterator[str]:
    """Given options that have no effect. Each row: option names, whether the run reads them, what would read them."""
    full = c.recompute_granularity == "full"
    rope, dynamic = c.position_embedding_type == "rope", c.fp16 and c.loss_scale is None
    rules = [
        ("rotary_base rotary_percent rotary_interleaved", rope, "--position-embedding-type rope"),
        ("gelu_approximate", not c.swiglu, "a gelu or geglu MLP, not --swiglu"),
        ("add_qkv_bias", c.disable_bias_linear, "--disable-bias-linear (biases are on, QKV's too)"),
        ("attn_post_norm_scale ffn_post_norm_scale", c.use_sandwich_norm, "--use-sandwich-norm"),
        ("shape_order", c.use_flash_attn, "flash attention, not --no-flash-attn"),
        ("min_lr lr_decay_iters", c.lr_decay_style != "constant", "a --lr-decay-style other than constant"),
        ("make_vocab_size_divisible_by", c.pad_vocab_size_to is None, "a vocabulary without --pad-vocab-size-to"),
        ("lr_warmup_init", c.lr_warmup_iters > 0, "--lr-warmup-iters"),
        ("lr_wsd_decay_style lr_wsd_decay_iters", c.lr_decay_style == "WSD", "--lr-decay-style WSD"),
        ("loss_scale", c.fp16, "--fp16"),
        ("initial_loss_scale min_loss_scale loss_scale_window hysteresis", dynamic, "--fp16 with a dynamic loss scale"),
        ("recompute_method recompute_num_layers", full, "--recompute-granularity full"),
        *_tokenizer_rules(c),
        ("split", not c.train_data_path, "data that all splits share, not --train-data-path"),
        ("valid_data_path test_data_path", bool(c.train_data_path), "--train-data-path"),
        ("valid_data_path eval_iters", c.eval_interval is not None, "--eval-interval"),
        ("reset_position_ids", c.position_embedding_type != "none", "a --position-embedding-type other than none"),
        ("wandb_exp_name", c.wandb_project is not None, "--wandb-project"),
        ("sample_temperature", c.sample_tokens > 0, "--sample-tokens above 0"),
        ("keep_checkpoint_max async_save", c.save is not None, "--save"),
        ("no_load_optim no_load_rng finetune", c.load is not None, "--load"),
        ("context_parallel_algo", c.context_parallel_size > 1, "--context-parallel-size above 1"),
    ]
    for names, is_read, reader in rules:
        for name in names.split():
            # False, None and () are the values of options that were not given; giving them explicitly is harmless.
            if name in c.given and not is_read and getattr(c, name) not in (False, None, ()):
                yield f"{_flag(name)} would be ignored: it needs {reader}. Remove it, or add that"


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
