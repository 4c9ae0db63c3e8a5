"""MindSpeed-Core-MS's sections: 126 of Megatron's arguments, under their own names (mindspeed.yaml).

Differences from HAL: it maps `hysteresis` to a factor (in Megatron and HAL it is a count), its validator refuses the
layout BSH, its `no_load_rng` defaults to True, its default algorithm of context parallelism is Ulysses, and two names
differ between its documentation and its code.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from .megatron_options import half_precision_loss
from .rules import Reading, Rule, int_of, load_rules, take
from .stage_lists import in_order, recomputation

SECTIONS = ("training_config", "parallel_config", "model_config", "dataset_config", "optimizer_config")
TABLE = Path(__file__).with_name("mindspeed.yaml")

PRECISIONS = {
    word: {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"))
    for word in (dtype, short)
}
CHOICES: dict[str, dict[str, Any]] = {
    "precision": PRECISIONS,
    "position": {word: word for word in ("rope", "learned_absolute", "none")},
    "norm": {prefix + kind: kind for prefix in ("", "Fused") for kind in ("LayerNorm", "RMSNorm")},
    "activation": {
        "swiglu": {"swiglu": True},
        "geglu": {"geglu": True},
        "gelu": {"gelu_approximate": "tanh"},
        "fast_gelu": {"gelu_approximate": "fast"},
    },
}
"""Values that MindSpeed-Core-MS and the MindFormers tutorial share, and the corresponding values in HAL."""


@functools.cache
def rules() -> dict[str, Rule]:
    """The rule of every key."""
    return load_rules(TABLE, CHOICES)


def finish(reading: Reading) -> None:
    """Sets the options that depend on several keys, and the defaults that differ from HAL's."""
    values = reading.values
    betas, key = take(reading, "betas")
    if key:
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise reading.refuse(key, f"two numbers; found {betas!r}")
        for option, beta in zip(("adam_beta1", "adam_beta2"), betas):
            reading.set(option, beta, key)
    grouped, key = take(reading, "gqa")
    heads = values.get("num_attention_heads")
    if grouped is True and "num_query_groups" not in values:
        raise reading.refuse(key, "needs model_config.num_query_groups")
    if grouped is False and values.get("num_query_groups", heads) != heads:
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
    for option in ("lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"):
        if values.get(option) == 0:  # its files have all lengths, of which those of another schedule are 0
            del values[option]
            reading.note(reading.origins.pop(option), "0 is no length")
    ends = [values.get(name) for name in ("start_weight_decay", "end_weight_decay")]
    if values.get("weight_decay_incr_style", "constant") == "constant" and None not in ends and ends[0] == ends[1]:
        # optimizer_param_scheduler.py takes these two, and not weight_decay, for the constant style as well.
        values["weight_decay"] = values.pop("start_weight_decay")
        reading.origins["weight_decay"] = reading.origins.pop("start_weight_decay")
        del values["end_weight_decay"], reading.origins["end_weight_decay"]
    epochs, key = take(reading, "epochs")
    if key and not any(reading.either(name) for name in ("train_iters", "train_samples")):
        raise reading.refuse(key, f"{epochs} epochs of data whose size the file does not specify; give --train-iters")
    half_precision_loss(reading)
    biases(reading)
    pipeline(reading)
    recomputation(reading, rows_are_ranks=True, together=False)


def residual(reading: Reading) -> None:
    """The dtype of the sums between the layers: the model's, or float32."""
    dtype, key = take(reading, "residual")
    if not key:
        return
    computed = {name: reading.values.get(name, False) for name in ("bf16", "fp16")}
    if dtype in ("float32", "fp32") and any(computed.values()):
        reading.set("fp32_residual_connection", True, key)
    elif PRECISIONS.get(str(dtype)) != computed:
        raise reading.refuse(key, f"{dtype!r}, but the residual stream has the dtype of compute_dtype, or float32")


def biases(reading: Reading) -> None:
    """The biases of QKV, projection and MLP."""
    linear, linear_key = take(reading, "linear_bias")
    given = [(linear, linear_key), take(reading, "qkv_bias"), take(reading, "proj_bias")]
    for value, key in given:
        if key and not isinstance(value, bool):
            raise reading.refuse(key, f"True or False; found {value!r}")
    if not any(key for _, key in given):
        return
    # add_bias_linear applies to all layers; the two narrower keys override it.
    default = True if linear is None else linear
    qkv, projection = (default if value is None else value for value, _ in given[1:])
    last = next(key for _, key in reversed(given) if key)
    everywhere = qkv and projection and default
    reading.set("disable_bias_linear", not everywhere, last)
    if not everywhere:
        for part, has in (("qkv", qkv), ("dense", projection), ("mlp", default)):
            reading.set(f"add_{part}_bias", has, last)


def pipeline(reading: Reading) -> None:
    """Virtual pipeline stages, and the list of layer counts per stage or per virtual stage."""
    values = reading.values
    virtual, virtual_key = take(reading, "virtual")
    layers, layers_key = take(reading, "layer_list")
    stages = values.get("pipeline_model_parallel_size", 1)
    rounds = 1 if virtual is None else int_of(virtual, f"{reading.file}: {virtual_key}")
    if layers_key:
        counts = in_order(reading, layers_key, layers, rows_are_ranks=True)
        total, declared = sum(counts), values.get("num_layers")
        if declared is not None and declared != total:
            raise reading.refuse(layers_key, f"its {total} layers are not the {declared} of num_layers")
        if virtual is not None and len(counts) != stages * rounds:
            raise reading.refuse(layers_key, f"{len(counts)} numbers for {stages} stages of {virtual_key} {virtual}")
        reading.set("num_layer_list", [str(n) for n in counts], layers_key)
        per_stage = values.pop("num_layers_per_virtual_pipeline_stage", None)
        if per_stage is not None and per_stage != max(counts):
            raise reading.refuse(layers_key, f"{per_stage} layers per virtual stage, but its largest has {max(counts)}")
    elif rounds > 1:
        count = values.get("num_layers")
        if count is None or count % (stages * rounds):
            raise reading.refuse(virtual_key, f"{virtual} virtual stages of {stages} do not divide {count} layers")
        reading.set("num_layers_per_virtual_pipeline_stage", count // (stages * rounds), virtual_key)
