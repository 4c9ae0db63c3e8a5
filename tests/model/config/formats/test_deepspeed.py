"""DeepSpeed's JSON: what is converted, noted and refused, and how it agrees with the command line."""

import pytest


def ds(**keys):
    return {key.replace("__", "."): value for key, value in keys.items()}


def test_a_deepspeed_configuration(from_file):
    content = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "wall_clock_breakdown": False,
        "fp16.enabled": True,
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": 16,
        "fp16.hysteresis": 2,
        "fp16.min_loss_scale": 1,
        "zero_optimization.stage": 2,
        "zero_optimization.reduce_bucket_size": 5e8,
        "zero_optimization.contiguous_gradients": True,
        "zero_optimization.offload_optimizer": {"device": "none"},
        "optimizer.type": "Adam",
        "optimizer.params.lr": 3e-4,
        "optimizer.params.betas": [0.9, 0.95],
        "optimizer.params.weight_decay": "auto",
        "scheduler.type": "WarmupDecayLR",
        "scheduler.params": {
            "warmup_num_steps": 10,
            "total_num_steps": 90,
            "warmup_max_lr": 3e-4,
            "warmup_type": "linear",
        },
    }
    config = from_file(content, "--nproc-per-node", "2", option="--deepspeed-config")
    assert (config.global_batch_size, config.micro_batch_size, config.zero_stage) == (16, 2, 2)
    assert config.fp16 and config.loss_scale is None and config.initial_loss_scale == 65536
    assert (config.lr, config.adam_beta2, config.clip_grad, config.log_interval) == (3e-4, 0.95, 0.5, 10)
    assert (config.lr_decay_style, config.lr_warmup_iters, config.lr_decay_iters, config.min_lr) == (
        "linear",
        10,
        90,
        0,
    )
    assert config.lr_warmup_style == "deepspeed_linear"
    assert "weight_decay" not in config.given and len(config.notes) == 2
    assert config.origins["zero_stage"].endswith("ds.json: zero_optimization.stage")


def test_buckets_of_replicated_gradients(from_file):
    keys = ds(
        zero_optimization__stage=0, zero_optimization__reduce_bucket_size=50000000, zero_optimization__overlap_comm=True
    )
    two = ("--nproc-per-node", "2", "--global-batch-size", "8")
    config = from_file(keys, *two, option="--deepspeed_config")
    assert config.ddp_bucket_size == 50_000_000 and config.overlap_grad_reduce and not config.notes


@pytest.mark.parametrize(
    "keys, argv, words",
    [
        (
            ds(zero_optimization__stage=2),
            "--nproc-per-node 2 --zero-stage 1",
            "zero_optimization.stage and command line contradict",
        ),
        (ds(train_batch_size=2048), "--global-batch-size 64", "contradict each other about --global-batch-size"),
        (ds(optimizer__params__lr=1e-3), "--lr 2e-3", "contradict each other about --lr"),
        (
            ds(train_batch_size=16, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4),
            "",
            "a global batch of 8, but",
        ),
        (ds(fp16__enabled=True), "--bf16", "--fp16 and --bf16 contradict"),
        (ds(zero_optimisation__stage=2), "", "there is no such key"),
        (ds(zero_optimization__stag=2), "", "Did you mean zero_optimization.stage?"),
        (ds(optimizer__type="Lamb"), "", "the optimizer is AdamW"),
        (ds(optimizer__params__adam_w_mode=False), "", "decoupled"),
        (ds(scheduler__type="OneCycle"), "", "is not one of WarmupLR"),
        (ds(scheduler__type="WarmupLR", scheduler__params={"warmup_type": "x"}), "", "'x' is neither log nor linear"),
        (ds(scheduler__type="WarmupLR", scheduler__params={"warmup_max": 1e-3}), "", "WarmupLR has"),
        (ds(fp16__initial_scale_power=1e9), "", "0 to 64"),
        (ds(gradient_accumulation_steps=0), "", "positive integer"),
    ],
)
def test_conflicts_with_deepspeed_are_refused(problem, keys, argv, words):
    assert words in problem(keys, *argv.split(), option="--deepspeed-config")


def test_what_only_saves_memory_or_reports_is_noted(from_file):
    content = {
        "zero_optimization.offload_param": {"device": "cpu", "pin_memory": True},
        "zero_optimization.offload_optimizer": {"device": "cpu"},
        "activation_checkpointing.cpu_checkpointing": True,
        "wall_clock_breakdown": True,
        "tensorboard.enabled": True,
        "steps_per_print": 20,
        "optimizer.params.max_grad_norm": 0.5,
    }
    config = from_file(content, option="--deepspeed-config")
    assert config.clip_grad == 0.5 and config.log_interval == 10
    assert config.checkpoint_in_cpu
    for key in (
        "state stays on the device: 8 bytes for each parameter",
        "weights stay on the device",
        "wall_clock_breakdown",
        "tensorboard",
        "steps_per_print",
    ):
        assert any(key in note for note in config.notes), key


def test_moments_of_deepspeed_may_stay_uncorrected_and_what_only_others_read_is_noted(from_file):
    keys = ds(optimizer__params__bias_correction=False, optimizer__params__freeze_step=9, gradient_predivide_factor=8)
    config = from_file({**keys, "curriculum_learning.min_difficulty": 64}, option="--deepspeed-config")
    assert not config.adam_bias_correction and len(config.notes) == 3


def test_the_microbatch_is_the_share_of_the_batch(from_file, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert from_file({"train_batch_size": 24}, option="--deepspeed-config").micro_batch_size == 12
    given = from_file({"train_batch_size": 24}, "--micro-batch-size", "3", option="--deepspeed-config")
    assert (given.global_batch_size, given.micro_batch_size) == (24, 3)
    content = {"train_batch_size": 24, "gradient_accumulation_steps": 3}
    config = from_file(content, option="--deepspeed-config")
    assert (config.micro_batch_size, config.global_batch_size) == (4, 24)


def test_deepspeeds_warm_up_to_a_cosine(from_file):
    params = {
        "total_num_steps": 80,
        "warmup_num_steps": 8,
        "warmup_min_ratio": 0.1,
        "cos_min_ratio": 0.01,
        "warmup_type": "linear",
    }
    keys = ds(optimizer__params__lr=1e-3, scheduler__type="WarmupCosineLR", scheduler__params=params)
    config = from_file(keys, option="--deepspeed-config")
    assert config.lr_decay_style == "cosine" and config.min_lr == pytest.approx(1e-5)
    assert config.lr_warmup_init == pytest.approx(1e-4) and config.lr_decay_iters == 80


def test_what_is_auto_in_a_schedule_is_left_to_the_options(from_file):
    """As in the examples of transformers, which fills these in from its own options."""
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    keys = ds(
        optimizer__params__lr="auto", scheduler__type="WarmupDecayLR", scheduler__params=dict.fromkeys(names, "auto")
    )
    given = ("--lr", "3e-5", "--lr-warmup-iters", "7", "--lr-decay-iters", "70")
    config = from_file(keys, *given, option="--deepspeed-config")
    assert (config.lr, config.lr_warmup_iters, config.lr_decay_iters) == (3e-5, 7, 70)
    assert (config.lr_warmup_style, config.lr_decay_style) == ("deepspeed_log", "linear")


def test_a_bucket_of_nothing_is_noted(from_file):
    config = from_file(ds(zero_optimization__reduce_bucket_size=0), option="--deepspeed-config")
    assert any("it changes when gradients are sent" in note for note in config.notes)


def test_the_environment_gives_way_to_every_file(from_file):
    config = from_file(ds(optimizer__params__lr=1e-3), option="--deepspeed-config", environ={"HAL_LR": "0.5"})
    assert config.lr == 1e-3


def test_keys_of_what_others_add_to_deepspeeds_file(from_file, problem):
    """As in LLaMA-Factory's examples/deepspeed and the tests of transformers."""
    keys = {
        "_comment": "supported models",
        "monitor_config": {"enabled": True},
        "comms_config": {"verbose": False},
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": True,
    }
    assert len(from_file(keys, option="--deepspeed-config").notes) == 4
    assert "--fp8-format and --fp8-recipe choose the products in float8" in problem(
        {"fp8.enabled": True}, option="--deepspeed-config"
    )
