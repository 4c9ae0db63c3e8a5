"""MindFormers' trainer files: runner_config, optimizer, lr_schedule, parallel_config, model.model_config and more.

The files describe Llama-like models (`LlamaConfig`), Qwen3 and GPT-2. Defaults of these classes that differ from HAL's
are set by `finish`: rotary positions, RMSNorm, a gated MLP and separate output weights.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ..schema import ConfigError, collecting
from .mindspeed import CHOICES, biases, residual
from .rules import MICROBATCHES, Reading, Rule, load_rules, number_of, take
from .stage_lists import recomputation

SECTIONS = ("runner_config", "runner_wrapper", "lr_schedule")
"""Sections by which such a file is recognised."""


@functools.cache
def rules() -> dict[str, Rule]:
    """The rule of every key, and of sections."""
    functions: dict[str, Rule] = {"profile_start_step": _profile_start_step}
    return load_rules(Path(__file__).with_name("mindformers_trainer.yaml"), CHOICES, functions)


def _profile_start_step(reading: Reading, key: str, value: Any) -> None:
    """MindFormers counts the first profiled step, Megatron the one before it."""
    reading.set("profile_step_start", _whole(reading, value, key, least=1) - 1, key)


def finish(reading: Reading) -> None:
    """Sets the options that depend on several keys, and defaults that differ from HAL's. All problems are collected."""
    kind, _ = take(reading, "kind")
    gpt2 = str(kind).startswith("GPT2")
    for step in (_model, residual, _stages, _training, _length, biases):
        with collecting(reading.problems):
            step(reading)
    llama = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
    }
    for option, value in ({} if gpt2 else llama).items():
        if option not in reading.values:
            reading.set(option, value, "model.model_config (default of its class)")


def _whole(reading: Reading, value: Any, key: str, least: int = -(2**31)) -> int:
    """A whole number of at least `least`. Raises ConfigError."""
    number = number_of(value, f"{reading.file}: {key}")
    if not number.is_integer() or not least <= number < 2**63:
        raise ConfigError(f"{reading.file}: {key}: expected a whole number, at least {least}; found {value!r}")
    return int(number)


def _model(reading: Reading) -> None:
    values = reading.values
    tied, key = take(reading, "tied")
    if key:
        reading.set("untie_embeddings_and_output_weights", not tied, key)
    multiple, key = take(reading, "multiple_of")
    factor, _ = take(reading, "ffn_multiplier")
    ratio, ratio_key = take(reading, "expand_ratio")
    hidden = values.get("hidden_size")
    if key and "ffn_hidden_size" not in values and hidden:
        # LlamaConfig: two thirds of 4 x hidden, times the multiplier, rounded up to a multiple.
        two_thirds = 8 * _whole(reading, hidden, "hidden_size") // 3
        width = _whole(reading, two_thirds * number_of(factor or 1, f"{reading.file}: {key}") // 1, key)
        step = _whole(reading, multiple, key, least=1)
        reading.set("ffn_hidden_size", -(-width // step) * step, key)
    if ratio_key and hidden:
        ffn = _whole(reading, ratio, ratio_key) * _whole(reading, hidden, "hidden_size")
        reading.set("ffn_hidden_size", ffn, ratio_key)


def _stages(reading: Reading) -> None:
    values = reading.values
    offset, key = take(reading, "offset")
    stages, layers = values.get("pipeline_model_parallel_size", 1), values.get("num_layers", 0)
    if key and offset not in (0, None) and stages > 1:
        rows = offset if isinstance(offset, list) else [offset]
        rows = rows if all(isinstance(row, list) for row in rows) else [rows]
        if any(len(row) != stages for row in rows):
            raise reading.refuse(key, f"rows of one number for each of {stages} stages; found {offset!r}")
        mean = layers // (stages * len(rows))
        counts = [mean + _whole(reading, difference, key) for row in rows for difference in row]
        reading.set("num_layer_list", [str(count) for count in counts], key)


def _training(reading: Reading) -> None:
    betas, key = take(reading, "betas")
    if key:
        if not isinstance(betas, list) or len(betas) != 2:
            raise reading.refuse(key, f"two numbers; found {betas!r}")
        for option, beta in zip(("adam_beta1", "adam_beta2"), betas):
            reading.set(option, beta, key)
    rate, key = take(reading, "optimizer_rate")
    if key and "lr" not in reading.values:  # lr_schedule replaces the optimizer's own rate
        reading.set("lr", rate, key)
    recomputation(reading, rows_are_ranks=False, together=True)
    count, key = take(reading, "accumulation")
    pipelined, other = take(reading, "micro_batch_num")
    if reading.values.get("pipeline_model_parallel_size", 1) > 1:
        count, key = pipelined, other  # without a pipeline, micro_batch_num has no effect
    if key:
        reading.set(MICROBATCHES, count, key)
    scale, key = take(reading, "loss_scale")
    if isinstance(scale, dict) and reading.values.get("fp16"):
        reading.set("initial_loss_scale", scale.get("loss_scale_value"), f"{key}.loss_scale_value")
        reading.set("loss_scale_window", scale.get("scale_window"), f"{key}.scale_window")
        if scale.get("scale_factor", 2) not in (2, 2.0):
            raise reading.refuse(f"{key}.scale_factor", "the loss scale changes by factors of 2")
    elif key and reading.values.get("fp16") and not isinstance(scale, dict):
        reading.set("loss_scale", scale, key)


def _length(reading: Reading) -> None:
    """The length of the run, and where weights come from."""
    epochs, key = take(reading, "epochs")
    steps, steps_key = take(reading, "total_steps")
    data, data_key = take(reading, "train_dataset")
    loader = data.get("data_loader") if isinstance(data, dict) else None
    loader = loader if isinstance(loader, dict) else {}
    nested = loader.get("config")
    settings: dict[str, Any] = nested if isinstance(nested, dict) else {}
    for ours, theirs in (
        ("seq_length", "seq_length"),
        ("eod_mask_loss", "eod_mask_loss"),
        ("reset_position_ids", "reset_position_ids"),
        ("reset_attention_mask", "reset_attention_mask"),
        ("data_path", "data_path"),
        ("split", "split"),
    ):
        if theirs in settings:
            reading.set(ours, settings[theirs], f"{data_key}.data_loader.config.{theirs}")
    if data_key and "data_path" not in settings:
        reading.note(data_key, "data are given by --data-path; `hal data preprocess` makes them of text")
    sizes = loader.get("sizes")
    given = [name for name in ("train_iters", "train_samples") if reading.either(name) is not None]
    if sizes and key and not given:
        where = f"{data_key}.data_loader.sizes"
        size = sizes[0] if isinstance(sizes, list) else sizes
        samples = _whole(reading, epochs, key) * _whole(reading, size, where)
        reading.set("train_samples", samples, f"{key} x {where}")
    elif key and not given:
        raise reading.refuse(key, f"{epochs} epochs of data whose size the file does not specify; give --train-iters")
    if steps_key and _whole(reading, steps, steps_key) > 0:
        reading.set("lr_decay_iters", steps, steps_key)
    load, load_key = take(reading, "load")
    resume, resume_key = take(reading, "resume")
    if load:
        reading.set("load", load, load_key)
        if resume is False:
            reading.set("finetune", True, resume_key)
    elif resume:
        raise reading.refuse(resume_key, "needs load_checkpoint")
