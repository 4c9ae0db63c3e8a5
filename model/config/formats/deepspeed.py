"""DeepSpeed's JSON (--deepspeed-config): batch sizes, precision, ZeRO, optimizer, schedule, clipping.

Its values must agree with the command line and --config, whereas DeepSpeed lets one of them take precedence. Keys that
only save memory or report become notes; keys that would change results are refused. deepspeed.yaml has the
keys.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from .rules import MICROBATCHES, Reading, Rule, int_of, load_rules, number_of, take


def _loss_scale(reading: Reading, key: str, value: Any) -> None:
    if number_of(value, f"{reading.file}: {key}") != 0:  # 0 selects dynamic scaling, which is HAL's default
        reading.set("loss_scale", value, key)


def _power(reading: Reading, key: str, value: Any) -> None:
    exponent = number_of(value, f"{reading.file}: {key}")
    if not 0 <= exponent <= 64:
        raise reading.refuse(key, f"a power of two, 0 to 64; found {value!r}")
    reading.set("initial_loss_scale", 2.0**exponent, key)


def _bucket(reading: Reading, key: str, value: Any) -> None:
    if value == 0:
        reading.note(key, "0 has no effect: the default --ddp-bucket-size holds; it changes when gradients are sent")
    else:
        reading.set("ddp_bucket_size", value, key)


def _betas(reading: Reading, key: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 2:
        raise reading.refuse(key, f"two numbers; found {value!r}")
    for option, beta in zip(("adam_beta1", "adam_beta2"), value):
        reading.set(option, beta, key)


@functools.cache
def rules() -> dict[str, Rule]:
    """The rule of every key."""
    functions = {"loss_scale": _loss_scale, "power": _power, "betas": _betas, "bucket": _bucket}
    return load_rules(Path(__file__).with_name("deepspeed.yaml"), functions=functions)


def without_auto(content: Any) -> Any:
    """The content without values "auto", which leave the choice to the program that reads the file. A schedule keeps
    them, because its parameters have defaults of their own."""
    if not isinstance(content, dict):
        return content
    return {
        key: value if key == "scheduler" else without_auto(value) for key, value in content.items() if value != "auto"
    }


def finish(reading: Reading) -> None:
    """Sets the options that depend on several keys."""
    given = {*reading.values, *reading.base}
    if "global_batch_size" in reading.values and not {MICROBATCHES, "micro_batch_size"} & given:
        # _set_batch_related_parameters in DeepSpeed's config.py: a batch alone is one microbatch of each rank.
        reading.set(MICROBATCHES, 1, "train_batch_size")
    scheduler, key = take(reading, "scheduler")
    if key:
        _schedule(reading, scheduler)


_WARMUP = {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}
_PARAMS = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": _WARMUP | {"total_num_steps"},
    "WarmupCosineLR": {"total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"},
}


def _schedule(reading: Reading, given: Any) -> None:
    """Sets the options for a schedule of DeepSpeed's lr_schedules.py.

    WarmupLR stays at its maximum, WarmupDecayLR falls linearly to its minimum, WarmupCosineLR to cos_min_ratio of the
    optimizer's rate. All of them warm up logarithmically by default, and in two steps at least. What is "auto" is left
    to HAL's options.
    """
    if not isinstance(given, dict) or set(given) - {"type", "params"}:
        raise reading.refuse("scheduler", "holds type and params")
    kind, params = str(given.get("type")), given.get("params") or {}
    if not isinstance(params, dict):
        raise reading.refuse("scheduler.params", f"holds keys; found {params!r}")
    if kind not in _PARAMS:
        raise reading.refuse("scheduler.type", f"{kind!r} is not one of {', '.join(_PARAMS)}")
    for name in params:
        if name not in _PARAMS[kind]:
            raise reading.refuse(f"scheduler.params.{name}", f"{kind} has {', '.join(sorted(_PARAMS[kind]))}")
    key = "scheduler.params"
    auto = {name for name, value in params.items() if value == "auto"}
    shape = params.get("warmup_type", "log")
    if shape not in ("log", "linear", "auto"):
        raise reading.refuse(f"{key}.warmup_type", f"{shape!r} is neither log nor linear")
    reading.set("lr_warmup_style", "deepspeed_linear" if shape == "linear" else "deepspeed_log", f"{key}.warmup_type")
    if "warmup_num_steps" not in auto:
        warmup = params.get("warmup_num_steps", 1000)
        where = f"{key}.warmup_num_steps"
        # DeepSpeed makes at least two steps of it, also of 0, which is an error of its newest versions.
        reading.set("lr_warmup_iters", max(2, int_of(warmup or 1, f"{reading.file}: {where}")), where)
    if kind != "WarmupLR" and "total_num_steps" not in auto:
        if "total_num_steps" not in params:
            raise reading.refuse(f"{key}.total_num_steps", f"{kind} needs it")
        reading.set("lr_decay_iters", params["total_num_steps"], f"{key}.total_num_steps")
    if kind == "WarmupCosineLR":
        peak = reading.either("lr")
        if peak is None:
            raise reading.refuse("scheduler", "WarmupCosineLR scales the rate of optimizer.params.lr, which is missing")
        for option, name, usual in (("lr_warmup_init", "warmup_min_ratio", 0.0), ("min_lr", "cos_min_ratio", 0.0001)):
            ratio = number_of(usual if name in auto else params.get(name, usual), f"{reading.file}: {key}.{name}")
            reading.set(option, ratio * peak, f"{key}.{name}")
        reading.set("lr_decay_style", "cosine", "scheduler.type")
        return
    # In DeepSpeed the schedule's maximum replaces the optimizer's rate; `set` demands that both are the same number.
    if "warmup_max_lr" not in auto:
        reading.set("lr", params.get("warmup_max_lr", 0.001), f"{key}.warmup_max_lr")
    if "warmup_min_lr" not in auto:
        reading.set("lr_warmup_init", params.get("warmup_min_lr", 0.0), f"{key}.warmup_min_lr")
    reading.set("lr_decay_style", "constant" if kind == "WarmupLR" else "linear", "scheduler.type")
    if kind == "WarmupDecayLR" and "warmup_min_lr" not in auto:
        reading.set("min_lr", params.get("warmup_min_lr", 0.0), f"{key}.warmup_min_lr")
