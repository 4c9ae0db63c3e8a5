"""DeepSpeed's JSON (--deepspeed-config): batch sizes, precision, ZeRO, optimizer, schedule, clipping.

Its values and the options of the command line or --config must agree; DeepSpeed itself lets one of them win. Keys that
only tune what does not exist here are told to the user; keys that would change results are refused.
"""

from __future__ import annotations

from typing import Any

from .rules import MICROBATCHES, Reading, Rule, noted, number_of, only, to

_ZERO, _FP16, _ADAM = "zero_optimization", "fp16", "optimizer.params"
_ALWAYS = noted("fully_shard reduces and gathers one layer per message, ahead of its use")
_OFF = only(False, why="leave it off: HAL reports through --run-dir (TensorBoard, run.json)")
_NO_OFFLOAD = "states stay on the device; --zero-stage 3 and recomputation save memory"


def _offload(reading: Reading, key: str, value: Any) -> None:
    if not (value is None or value is False or (isinstance(value, dict) and value.get("device", "none") == "none")):
        raise reading.refuse(key, _NO_OFFLOAD)


def _loss_scale(reading: Reading, key: str, value: Any) -> None:
    if number_of(value, f"{reading.file}: {key}") != 0:  # 0 is dynamic
        reading.set("loss_scale", value, key)


def _power(reading: Reading, key: str, value: Any) -> None:
    exponent = number_of(value, f"{reading.file}: {key}")
    if not 0 <= exponent <= 64:
        raise reading.refuse(key, f"a power of two, 0 to 64; found {value!r}")
    reading.set("initial_loss_scale", 2.0**exponent, key)


def _betas(reading: Reading, key: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 2:
        raise reading.refuse(key, f"two numbers; found {value!r}")
    for option, beta in zip(("adam_beta1", "adam_beta2"), value):
        reading.set(option, beta, key)


def _scheduler(reading: Reading, key: str, value: Any) -> None:
    reading.values["@scheduler"] = value


RULES: dict[str, Rule] = {
    "train_batch_size": to("global_batch_size"),
    "train_micro_batch_size_per_gpu": to("micro_batch_size"),
    "gradient_accumulation_steps": to(MICROBATCHES),
    "steps_per_print": to("log_interval"),
    "gradient_clipping": to("clip_grad"),
    "wall_clock_breakdown": _OFF,
    "dump_state": _OFF,
    "memory_breakdown": _OFF,
    "prescale_gradients": only(False, why="the loss is scaled by the whole batch before the backward pass"),
    "gradient_predivide_factor": only(1, 1.0, why="the loss is scaled by the whole batch before the backward pass"),
    "sparse_gradients": only(False, why="gradients are dense"),
    "communication_data_type": only("fp32", why="gradients are reduced in float32"),
    "zero_allow_untested_optimizer": noted("there is one optimizer"),
    "zero_force_ds_cpu_optimizer": noted("there is one optimizer"),
    "bf16.enabled": to("bf16"),
    f"{_FP16}.enabled": to("fp16"),
    f"{_FP16}.auto_cast": only(False, why="the model computes in one dtype"),
    f"{_FP16}.loss_scale": _loss_scale,
    f"{_FP16}.initial_scale_power": _power,
    f"{_FP16}.loss_scale_window": to("loss_scale_window"),
    f"{_FP16}.hysteresis": to("hysteresis"),
    f"{_FP16}.consecutive_hysteresis": only(False, why="overflows are counted as Megatron counts them"),
    f"{_FP16}.min_loss_scale": to("min_loss_scale"),
    f"{_ZERO}.stage": to("zero_stage"),
    f"{_ZERO}.reduce_bucket_size": to("ddp_bucket_size"),
    f"{_ZERO}.allgather_bucket_size": _ALWAYS,
    f"{_ZERO}.overlap_comm": to("overlap_grad_reduce"),
    f"{_ZERO}.allgather_partitions": _ALWAYS,
    f"{_ZERO}.reduce_scatter": _ALWAYS,
    f"{_ZERO}.contiguous_gradients": _ALWAYS,
    f"{_ZERO}.round_robin_gradients": _ALWAYS,
    f"{_ZERO}.sub_group_size": _ALWAYS,
    f"{_ZERO}.stage3_prefetch_bucket_size": _ALWAYS,
    f"{_ZERO}.stage3_param_persistence_threshold": _ALWAYS,
    f"{_ZERO}.stage3_max_live_parameters": _ALWAYS,
    f"{_ZERO}.stage3_max_reuse_distance": _ALWAYS,
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": noted("checkpoints load under any layout"),
    f"{_ZERO}.load_from_fp32_weights": noted("weights always come from their float32 copies", True),
    f"{_ZERO}.offload_optimizer": _offload,
    f"{_ZERO}.offload_param": _offload,
    f"{_ZERO}.cpu_offload": only(False, why=_NO_OFFLOAD),
    "optimizer.type": only("Adam", "AdamW", "FusedAdam", why="the optimizer is AdamW"),
    f"{_ADAM}.lr": to("lr"),
    f"{_ADAM}.betas": _betas,
    f"{_ADAM}.eps": to("adam_eps"),
    f"{_ADAM}.weight_decay": to("weight_decay"),
    f"{_ADAM}.adam_w_mode": only(True, why="weight decay is decoupled (AdamW)"),
    f"{_ADAM}.bias_correction": only(True, why="moments are always corrected"),
    f"{_ADAM}.torch_adam": noted("the backend's AdamW is used"),
    "scheduler": _scheduler,
    "activation_checkpointing.partition_activations": only(
        False, why="--sequence-parallel splits the same activations"
    ),
    "activation_checkpointing.cpu_checkpointing": only(False, why="activations stay on the device"),
    "activation_checkpointing.contiguous_memory_optimization": only(False, why="memory is the backend's part"),
    "activation_checkpointing.number_checkpoints": only(why="--recompute-granularity and its options say it"),
    "activation_checkpointing.synchronize_checkpoint_boundary": only(False, why="nothing waits between layers"),
    "activation_checkpointing.profile": _OFF,
    **{f"{name}.enabled": _OFF for name in ("tensorboard", "wandb", "csv_monitor", "flops_profiler", "comms_logger")},
}


def without_auto(content: Any) -> Any:
    """The content without values "auto", which leave a choice to the integration that reads the file."""
    if not isinstance(content, dict):
        return content
    return {key: without_auto(value) for key, value in content.items() if value != "auto"}


def finish(reading: Reading) -> None:
    """What follows from several keys together."""
    scheduler = reading.values.pop("@scheduler", None)
    if scheduler is not None:
        _schedule(reading, scheduler)


_WARMUP = {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}
_PARAMS = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": _WARMUP | {"total_num_steps"},
    "WarmupCosineLR": {"total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"},
}


def _schedule(reading: Reading, given: Any) -> None:
    """DeepSpeed's lr_schedules.py: WarmupLR stays at its maximum, WarmupDecayLR falls linearly to 0, WarmupCosineLR to
    cos_min_ratio of the optimizer's rate. All warm up logarithmically unless told otherwise, which HAL does not."""
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
    warmup = params.get("warmup_num_steps", 1000)
    if warmup and params.get("warmup_type", "log") != "linear":
        raise reading.refuse(
            f"{key}.warmup_type", 'the warm-up is linear here, and "log" by default there; say "linear"'
        )
    reading.set("lr_warmup_iters", warmup, f"{key}.warmup_num_steps")
    if kind != "WarmupLR":
        if "total_num_steps" not in params:
            raise reading.refuse(f"{key}.total_num_steps", f"{kind} needs it")
        reading.set("lr_decay_iters", params["total_num_steps"], f"{key}.total_num_steps")
    if kind == "WarmupCosineLR":
        peak = reading.values.get("lr")
        if peak is None:
            raise reading.refuse("scheduler", "WarmupCosineLR scales the rate of optimizer.params.lr, which is missing")
        for option, name, usual in (("lr_warmup_init", "warmup_min_ratio", 0.0), ("min_lr", "cos_min_ratio", 0.0001)):
            ratio = number_of(params.get(name, usual), f"{reading.file}: {key}.{name}")
            if option == "min_lr" or warmup:
                reading.set(option, ratio * peak, f"{key}.{name}")
        reading.set("lr_decay_style", "cosine", "scheduler.type")
        return
    # The schedule's maximum replaces the optimizer's rate there; here they must be one number.
    reading.set("lr", params.get("warmup_max_lr", 0.001), f"{key}.warmup_max_lr")
    if warmup:
        reading.set("lr_warmup_init", params.get("warmup_min_lr", 0.0), f"{key}.warmup_min_lr")
    reading.set("lr_decay_style", "constant" if kind == "WarmupLR" else "linear", "scheduler.type")
    if kind == "WarmupDecayLR":
        reading.set("min_lr", 0.0, "scheduler.type")
