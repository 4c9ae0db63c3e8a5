"""MindFormers' trainer files: runner_config, optimizer, lr_schedule, parallel_config, model.model_config and more.

The files describe Llama-like models (`LlamaConfig`, `InternLM2Config`), Qwen 1 and 3, GLM 3 and 4, and GPT-2. Defaults
of these classes that differ from HAL's are set by `finish`: sizes, rotary positions, RMSNorm, a gated MLP and separate
output weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hal.untrusted import shown

from ..schema import ConfigError, collecting
from .mindspeed import CHOICES, biases, residual
from .rules import MICROBATCHES, Reading, Rule, load_rules, number_of, take
from .stage_lists import recomputation

SECTIONS = ("run_mode", "runner_config", "runner_wrapper", "lr_schedule")
"""Keys by which such a file is recognised."""

MODELS = (
    "LlamaForCausalLM",
    "InternLM2ForCausalLM",
    "QwenForCausalLM",
    "ChatGLM2ForConditionalGeneration",
    "GPT2LMHeadModel",
)
"""The classes of model.arch.type whose configuration the table describes. Other classes read keys of the same names in
other ways."""
_NORMALISED_HEAD = "its output layer scales every row of its weight to length 1 (NormHead), which HAL's does not"
_OTHER_MODELS = {
    "TelechatForCausalLM": "the last layer of its MLP has a bias and the first has none; --add-mlp-bias is about both",
    "Baichuan7BV2ForCausalLM": _NORMALISED_HEAD,
    "Baichuan13BV2ForCausalLM": f"{_NORMALISED_HEAD}; its positions are ALiBi, for which HAL's attention has no bias",
}
"""What HAL's model lacks for others (research/telechat2/telechat_layer.py, research/baichuan2)."""


@functools.cache
def rules() -> dict[str, Rule]:
    """The rule of every key, and of sections."""
    functions: dict[str, Rule] = {"profile_start_step": _profile_start_step}
    return load_rules(
        Path(__file__).with_name("mindformers_trainer.yaml"), {**CHOICES, "optimizers": _OPTIMIZERS}, functions
    )


def _profile_start_step(reading: Reading, key: str, value: Any) -> None:
    """MindFormers counts the first profiled step, Megatron the one before it."""
    reading.set("profile_step_start", _whole(reading, value, key, least=1) - 1, key)


_OPTIMIZERS = {
    "AdamW": {"adam_bias_correction": True},
    "AdamWeightDecayX": {"adam_bias_correction": True, "adam_eps_before_correction": True},
    "AdamWeightDecay": {"adam_bias_correction": False},
    "FP32StateAdamWeightDecay": {"adam_bias_correction": False},
    "FusedAdamWeightDecay": {"adam_bias_correction": False},
}
"""MindSpore's AdamWeightDecay and its variants in core/optim/optim.py do not correct the moments; core/optim/adamw.py
does, and so does research/qwen/optim.py, which adds epsilon before."""


def require_gpt(reading: Reading, content: Mapping[Any, Any]) -> None:
    """Collects what says that the file does not train all weights of a model that HAL has."""
    for check in (_require_training, _require_class, _require_architectures, _require_dense):
        with collecting(reading.problems):
            check(reading, content)


def _require_training(reading: Reading, content: Mapping[Any, Any]) -> None:
    mode = content.get("run_mode")
    if mode not in ("train", "finetune", None):
        raise reading.refuse("run_mode", f"{mode!r}: `hal train` trains; `hal eval` and `hal generate` use a model")
    task = _at(content, "trainer", "type")
    if task not in ("CausalLanguageModelingTrainer", None):
        raise reading.refuse("trainer.type", f"{task!r}: `hal train` trains a GPT, by CausalLanguageModelingTrainer")


def _require_class(reading: Reading, content: Mapping[Any, Any]) -> None:
    for key in ("model.arch.type", "model.model_config.type"):
        name = _at(content, *key.split("."))
        if not isinstance(name, (str, type(None))):
            raise reading.refuse(key, f"expected the name of one class; found {shown(name)}", "wrong")
    model = _at(content, "model", "arch", "type")
    if model in _OTHER_MODELS:
        raise reading.refuse("model.arch.type", f"{model!r}: {_OTHER_MODELS[model]}")
    _require_known(reading, "model.arch.type", model, MODELS)


def _require_architectures(reading: Reading, content: Mapping[Any, Any]) -> None:
    classes = _at(content, "model", "model_config", "architectures")
    for name in classes if isinstance(classes, list) else [classes]:
        _require_known(reading, ARCHITECTURES, name, (*MODELS, _QWEN3))
        if name == _QWEN3:
            _require_defaults(reading, content["model"]["model_config"])


def _require_dense(reading: Reading, content: Mapping[Any, Any]) -> None:
    for key in EXPERT_COUNTS:
        experts = _at(content, *key.split("."))
        if experts not in (None, 0, 1):
            raise reading.refuse(
                key,
                f"{shown(experts)} experts: MindFormers drops tokens and weights the rest in ways that HAL's experts "
                "(--num-experts and the options of its group) do not have",
            )


EXPERT_COUNTS = (
    "moe_config.expert_num",
    *(f"model.model_config.{name}" for name in ("num_experts", "n_routed_experts", "num_moe_experts")),
)
"""Keys of the number of experts of a layer: of the trainer, and of the classes of r1.7.0."""

ARCHITECTURES, _QWEN3 = "model.model_config.architectures", "Qwen3ForCausalLM"
_QWEN3_KEYS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "seq_length", "rms_norm_eps", "compute_dtype", "qk_layernorm"),
)
"""What a file of Qwen3 must give: without them, the defaults of its Qwen3Config hold, which are not HAL's."""


def _require_known(reading: Reading, key: str, name: Any, known: Sequence[str]) -> None:
    if name not in (*known, None):
        raise reading.refuse(key, f"{shown(name)} is none of the models whose keys are known: {', '.join(known)}")


def _require_defaults(reading: Reading, model: Mapping[Any, Any]) -> None:
    """Raises ConfigError if a file of Qwen3 relies on defaults."""
    absent = [name for name in _QWEN3_KEYS if name not in model]
    if absent:
        raise reading.refuse(
            ARCHITECTURES, f"{_QWEN3} has defaults for {', '.join(absent)} that HAL does not have; give them"
        )
    if model["qk_layernorm"] is not True:  # modeling_qwen3_train.py does not read the key
        raise reading.refuse("model.model_config.qk_layernorm", f"{_QWEN3} always has these norms; set it to True")


def _at(content: Any, *keys: str) -> Any:
    """The value at these nested keys, or None."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


OF_CLASS = "model.model_config (default of its class)"

_LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
}
_LLAMA_7B = {"hidden_size": 4096, "num_layers": 32, "num_attention_heads": 32, "seq_length": 2048}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {**_LLAMA, **_LLAMA_7B, "pad_vocab_size_to": 32000},
    "InternLM2Config": {
        **_LLAMA,
        **_LLAMA_7B,
        "num_query_groups": 8,
        "ffn_hidden_size": 14336,
        "rotary_base": 1e6,
        "pad_vocab_size_to": 92544,
    },
    "QwenConfig": {**_LLAMA, **_LLAMA_7B, "pad_vocab_size_to": 32000},
    "ChatGLM2Config": {
        **_LLAMA,
        **_LLAMA_7B,
        "num_layers": 28,
        "kv_channels": 128,
        "num_query_groups": 2,
        "ffn_hidden_size": 13696,
        "pad_vocab_size_to": 65024,
    },
    "GPT2Config": {
        "hidden_size": 768,
        "num_layers": 12,
        "num_attention_heads": 12,
        "seq_length": 1024,
        "pad_vocab_size_to": 50257,
    },
}
"""What the classes of model.model_config.type take for absent keys, where HAL takes something else."""


def finish(reading: Reading) -> None:
    """Sets the options that depend on several keys, and defaults that differ from HAL's. All problems are collected."""
    kind, _ = take(reading, "kind")
    kind = str(kind)
    if kind in _DEFAULTS:  # other options follow from these
        sizes = {name: _DEFAULTS[kind][name] for name in ("hidden_size", "num_layers")}
        _fill(reading, {**sizes, "fp16": True}, OF_CLASS)
    if kind == "LlamaConfig":
        _fill(reading, {"@multiple_of": 256}, OF_CLASS)
    if kind == "QwenConfig":
        _qwen(reading)
    if kind == "ChatGLM2Config":
        with collecting(reading.problems):
            _glm(reading)
    for step in (_model, residual, _extension, _stages, _training, _schedule, _gradients, _length, biases):
        with collecting(reading.problems):
            step(reading)
    # base_trainer.py passes 0 if there is no weight decay; core/optim/optim.py and adamw.py have the values of epsilon.
    corrects = reading.values.get("adam_bias_correction", True)
    _fill(reading, {"weight_decay": 0.0, "adam_eps": 1e-8 if corrects else 1e-6}, "optimizer (default of its class)")
    _fill(reading, _DEFAULTS.get(kind, _LLAMA), OF_CLASS)
    _vocabulary(reading)


def _fill(reading: Reading, options: Mapping[str, Any], key: str) -> None:
    """Sets options, or deferred values, that the file does not set."""
    for option, value in options.items():
        if option not in reading.values:
            reading.values[option], reading.origins[option] = value, key


def _whole(reading: Reading, value: Any, key: str, least: int = -(2**31)) -> int:
    """A whole number of at least `least`. Raises ConfigError."""
    number = number_of(value, f"{reading.file}: {key}")
    if not number.is_integer() or not least <= number < 2**63:
        raise ConfigError(f"{reading.file}: {key}: expected a whole number, at least {least}; found {value!r}")
    return int(number)


def _glm(reading: Reading) -> None:
    """GLM's rotary positions, of half of the channels in pairs of neighbours (models/glm2/glm2.py and glm2_modules.py),
    its biases of QKV, and its sums between layers, whose dtype is residual_dtype alone (glm2_transformer.py)."""
    ratio, key = take(reading, "rope_ratio")
    base = 10000.0 * (number_of(ratio, f"{reading.file}: {key}") if key else 1.0)
    _fill(reading, {"rotary_percent": 0.5, "rotary_interleaved": True, "rotary_base": base}, OF_CLASS)
    if reading.values.pop("fp32_residual_connection", None) is not None:
        reading.note("model.model_config.fp32_residual_connection", "it is not read; residual_dtype is")
    _fill(reading, {"@residual": "float32", "@qkv_bias": True, "@linear_bias": False}, OF_CLASS)


def _qwen(reading: Reading) -> None:
    """Qwen's layers have biases of QKV only, keys for every head, and separate output weights. The model does not read
    the keys that would say otherwise (research/qwen/qwen_model.py)."""
    for option, key in (
        ("kv_channels", "kv_channels"),
        ("num_query_groups", "n_kv_heads"),
        ("rotary_percent", "rotary_pct"),
        ("rotary_base", "rotary_emb_base"),
        ("@tied", "tie_word_embeddings"),
        ("@qkv_bias", "qkv_has_bias"),
    ):
        if reading.origins.get(option) == f"model.model_config.{key}":
            del reading.values[option], reading.origins[option]
            reading.note(f"model.model_config.{key}", "QwenForCausalLM does not read it")
    _fill(reading, {"@qkv_bias": True, "@linear_bias": False}, OF_CLASS)


def _extension(reading: Reading) -> None:
    """The extension of rotary positions to longer sequences."""
    method, key = take(reading, "extension")
    factor, factor_key = take(reading, "scaling")
    if method == "PI":
        reading.set("rotary_seq_len_interpolation_factor", 1.0 if factor is None else factor, factor_key or key)
    elif str(method).lower() != "none":
        raise reading.refuse(key, f"{method!r}: rotary positions are plain (None) or interpolated (PI)")
    elif factor not in (None, 1, 1.0):
        reading.note(factor_key, "only extend_method reads it")


def _vocabulary(reading: Reading) -> None:
    """Makes tensor-parallel ranks have equal shares of the vocabulary. MindFormers does not shard one that they do not
    divide; the rows that are added here take no part in the loss."""
    rows, ranks = reading.values.get("pad_vocab_size_to"), reading.values.get("tensor_model_parallel_size", 1)
    if rows is not None and ranks > 0 and rows % ranks:
        key = reading.origins["pad_vocab_size_to"]
        reading.values["pad_vocab_size_to"] = -(-rows // ranks) * ranks
        reading.set("mask_padded_vocab", True, key)
        reading.note(key, f"{rows} rows cannot be divided over {ranks} ranks; added ones take no part in the loss")


def _model(reading: Reading) -> None:
    values = reading.values
    tied, key = take(reading, "tied")
    if key:
        reading.set("untie_embeddings_and_output_weights", not tied, key)
    multiple, key = take(reading, "multiple_of")
    factor, _ = take(reading, "ffn_multiplier")
    ratio, ratio_key = take(reading, "expand_ratio")
    hidden = values.get("hidden_size")
    rows, rows_key = take(reading, "vocabulary")
    reading.set("pad_vocab_size_to", rows, rows_key)
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


_SCHEDULES = {
    "constantwarmuplr": "constant",
    "constant_with_warmup": "constant",
    "cosinewithwarmuplr": "cosine",
    "cosine": "cosine",
    "linearwithwarmuplr": "linear",
    "linear": "linear",
    "polynomialwithwarmuplr": "polynomial",
    "polynomial": "polynomial",
}
"""Schedules of core/lr/lr_schedule.py and their second names in build_lr.py, in lower case."""


def _schedule(reading: Reading) -> None:
    """The shape of the learning rate; it is constant without a schedule. Only `polynomial` has a default other than 0
    of its last value, and `linear` reads none."""
    name, key = take(reading, "schedule")
    end, end_key = take(reading, "lr_end")
    steps, steps_key = take(reading, "warmup_steps")
    if steps_key and "lr_warmup_fraction" in reading.values:
        reading.note(steps_key, "warmup_ratio replaces it")
    elif steps_key:
        reading.set("lr_warmup_iters", steps, steps_key)
    style = _SCHEDULES.get(str(name).lower()) if key else "constant"
    if style is None:
        raise reading.refuse(key, f"{name!r} is not one of {', '.join(_SCHEDULES)} (it sets --lr-decay-style)")
    reading.set("lr_decay_style", "linear" if style == "polynomial" else style, key or "lr_schedule (there is none)")
    if style == "linear" and end_key:
        reading.note(end_key, f"{end!r} has no effect: {name} ends at 0")
    elif end_key:
        reading.set("min_lr", end, end_key)
    elif style == "polynomial":
        reading.set("min_lr", 1e-7, f"{key} (its default of lr_end)")


def _gradients(reading: Reading) -> None:
    """Clipping of gradients, by the cells of wrapper/wrapper.py: that for several microbatches clips by default."""
    clips, key = take(reading, "clips")
    norm, norm_key = take(reading, "max_grad_norm")
    if clips is None:
        several = reading.values.get(MICROBATCHES, 1) > 1 or reading.values.get("pipeline_model_parallel_size", 1) > 1
        clips, key = several, "runner_wrapper.use_clip_grad (default of its class)"
    reading.set("clip_grad", (1.0 if norm is None else norm) if clips else 0.0, norm_key if clips and norm_key else key)


def _length(reading: Reading) -> None:
    """The length of the run, and where weights come from."""
    epochs, key = take(reading, "epochs")
    steps, steps_key = take(reading, "total_steps")
    if steps_key and _whole(reading, steps, steps_key) > 0:
        reading.set("lr_decay_iters", steps, steps_key)
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
    columns = data.get("input_columns") if isinstance(data, dict) else None
    answers = isinstance(columns, list) and not {"labels", "target_ids"}.isdisjoint(map(str, columns))
    if answers and not settings:  # Megatron's datasets have labels of all tokens, and settings
        reading.set("sft", True, f"{data_key}.input_columns")
        reading.note(
            data_key,
            "data are given by --data-path: JSON lines of prompts and answers, of which answers count; ids beyond the "
            "tokenizer, which MindFormers' softmax includes, are left out of the loss",
        )
    elif data_key and "data_path" not in settings:
        reading.note(data_key, "data are given by --data-path; `hal data preprocess` makes them of text")
    sizes = loader.get("sizes")
    given = [name for name in ("train_iters", "train_samples") if reading.either(name) is not None]
    if sizes and key and not given:
        where = f"{data_key}.data_loader.sizes"
        size = sizes[0] if isinstance(sizes, list) else sizes
        samples = _whole(reading, epochs, key) * _whole(reading, size, where)
        reading.set("train_samples", samples, f"{key} x {where}")
    elif key and not given and reading.values.get("sft"):
        reading.set("num_train_epochs", epochs, key)
    elif key and not given:
        text = f"{epochs} epochs of data whose size the file does not specify; give --train-iters"
        reading.problems.append(reading.refuse(key, text))
        if "lr_decay_iters" not in reading.values:  # a warm-up cannot be compared with a length that is not known
            reading.values.pop("lr_warmup_iters", None)
    load, load_key = take(reading, "load")
    resume, resume_key = take(reading, "resume")
    if load:
        reading.set("load", load, load_key)
        if resume is False:
            reading.set("finetune", True, resume_key)
    elif resume:
        raise reading.refuse(resume_key, "needs load_checkpoint")
