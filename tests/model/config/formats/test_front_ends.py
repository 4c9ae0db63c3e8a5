"""Files of other systems are converted to HAL's options key by key; unsupported keys are refused, never dropped."""

import json
import re
from pathlib import Path

import pytest
import yaml

from hal.cli import main
from hal.model.config.command_line import parse, read_config
from hal.model.config.formats import deepspeed, mindformers, mindspeed
from hal.model.config.schema import READY, ConfigError
from hal.model.gpt.model import GPT


def nested(keys):
    """{"a.b": 1} as {"a": {"b": 1}}."""
    tree = {}
    for key, value in keys.items():
        node = tree
        *folders, last = key.split(".")
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = value
    return tree


@pytest.fixture
def from_file(tmp_path):
    """The Config of a file with the given dotted keys, and more options."""

    def make(keys, *argv, option="--config", environ=None):
        path = tmp_path / ("c.yaml" if option == "--config" else "ds.json")
        path.write_text(yaml.safe_dump(nested(keys)) if option == "--config" else json.dumps(nested(keys)))
        return parse([option, str(path), *argv], environ or {})

    return make


@pytest.fixture
def problem(from_file):
    def find(keys, *argv, **how):
        with pytest.raises(ConfigError) as caught:
            from_file(keys, *argv, **how)
        assert "\n" not in str(caught.value).split(" (see ")[0]
        return str(caught.value)

    return find


# MindSpeed-Core-MS


def megatron_arguments():
    """(key, names of Megatron's arguments) of every entry; mindspeed.yaml says where the names are."""
    for key, entry in yaml.safe_load(mindspeed.TABLE.read_text()).items():
        if isinstance(entry, dict) and entry.get("megatron", "") is None:
            continue  # not an argument of Megatron
        name = entry if isinstance(entry, str) else entry.get("megatron", key.rsplit(".", 1)[-1])
        yield key, name if isinstance(name, list) else [name]


def test_the_mapping_has_all_126_arguments_and_each_has_a_rule():
    arguments = [argument for _, names in megatron_arguments() for argument in names]
    assert len(arguments) == len(set(arguments)) == 126
    assert {key.split(".")[0] for key in mindspeed.rules()} == {*mindspeed.SECTIONS, "lora_config"}
    assert len(list(megatron_arguments())) == 125  # both betas are one list


@pytest.mark.parametrize("front", [mindspeed, mindformers, deepspeed])
def test_no_key_of_a_table_is_there_twice(front):
    """YAML itself would silently keep the last rule."""
    table = Path(front.__file__).with_suffix(".yaml").read_text()
    assert len(re.findall(r"^[\w.-]+:", table, re.MULTILINE)) == len(front.rules())


DIRECT = {
    "model_config.hidden_size": (64, "hidden_size", 64),
    "model_config.num_layers": (2, "num_layers", 2),
    "model_config.vocab_size": (512, "pad_vocab_size_to", 512),
    "model_config.attention_dropout_rate": (0.2, "attention_dropout", 0.2),
    "model_config.use_rotary_embedding": (True, "position_embedding_type", "rope"),
    "model_config.normalization": ("FusedRMSNorm", "normalization", "RMSNorm"),
    "model_config.hidden_act": ("swiglu", "swiglu", True),
    "model_config.compute_dtype": ("bfloat16", "bf16", True),
    "model_config.use_flash_attention": (False, "use_flash_attn", False),
    "model_config.fa_config.pre_tokens": (65536, "pre_tokens", 65536),
    "training_config.training_iters": (7, "train_iters", 7),
    "training_config.output_dir": ("here", "save", "here"),
    "dataset_config.batch_size": (2, "micro_batch_size", 2),
    "dataset_config.eod_mask_loss": (True, "eod_mask_loss", True),
    "dataset_config.micro_batch_num": (3, "global_batch_size", 12),
    "optimizer_config.learning_rate": ("1e-5", "lr", 1e-5),
    "optimizer_config.betas": ([0.8, 0.7], "adam_beta2", 0.7),
    "optimizer_config.beta2": (0.7, "adam_beta2", 0.7),
    "parallel_config.recompute": (True, "recompute_granularity", "full"),
    "parallel_config.select_recompute": (True, "recompute_granularity", "selective"),
}


@pytest.mark.parametrize("key", DIRECT)
def test_a_key_of_mindspeed_is_an_option(from_file, key):
    value, option, expected = DIRECT[key]
    config = from_file({key: value})
    assert getattr(config, option) == expected
    assert config.origins[option].endswith(f"c.yaml: {key}")


def test_every_key_of_mindspeed_is_taken_or_refused_with_a_reason(tmp_path):
    """No key of the table is unknown or dropped: its value changes an option, adds a note, or is an error."""
    words = {"shape_order": "SBH", "lr_decay_style": "cosine", "recompute_granularity": "full"}
    usual = ["adamw", "rope", "RMSNorm", "swiglu", "float32", "ulysses_cp_algo", "constant", 1, True, False, [0.9, 0.9]]
    for key, (argument, *_) in megatron_arguments():
        outcomes = set()
        for value in [words.get(argument), *usual]:
            (tmp_path / "c.yaml").write_text(yaml.safe_dump(nested({key: value})))
            try:
                reading = read_config(str(tmp_path / "c.yaml"))
                for refused in reading.problems:
                    assert "there is no such key" not in refused.text
                outcomes.add(repr((reading.values, reading.notes, reading.problems)))
            except ConfigError as error:
                assert "there is no such key" not in str(error)
                outcomes.add(str(error))
        assert len(outcomes) > 1, f"{key} has no effect: all its values give the same result"


def test_documented_mismatches(from_file, problem):
    assert "counts overflows; give that as --hysteresis" in problem({"training_config.loss_scale_factor": 4})
    assert from_file({"training_config.loss_scale_factor": 2}).hysteresis == 2
    assert from_file({"model_config.fa_config.input_layout": "BSH"}).shape_order == "BSH"
    loading = from_file({"training_config.load_checkpoint": "x"})
    assert not loading.no_load_rng and "MindSpeed-Core-MS would take True" in loading.notes[0]
    both = from_file({"parallel_config.context_parallel_size": 2, "training_config.seed": 3}, "--nproc-per-node", "2")
    assert both.context_parallel_algo == "ulysses" and "default" in both.origins["context_parallel_algo"]
    ring = {"parallel_config.context_parallel_size": 2, "parallel_config.context_parallel_algo": "megatron_cp_algo"}
    assert from_file(ring, "--nproc-per-node", "2").context_parallel_algo == "ring"


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"add_bias_linear": False}, (False, False, False)),
        ({"add_bias_linear": False, "qkv_has_bias": True, "out_proj_has_bias": False}, (True, False, False)),
        ({"qkv_has_bias": True, "out_proj_has_bias": True}, (True, True, True)),
        ({"add_bias_linear": True, "qkv_has_bias": False}, (False, True, True)),
        ({"qkv_has_bias": False, "out_proj_has_bias": False}, (False, False, True)),
    ],
)
def test_biases(from_file, keys, expected):
    config = from_file({f"model_config.{key}": value for key, value in keys.items()})
    assert (config.qkv_bias, config.projection_bias, config.mlp_bias) == expected


PIPELINE = {
    "model_config.num_layers": 8,
    "parallel_config.pipeline_model_parallel_size": 2,
    "dataset_config.micro_batch_num": 4,
}


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"num_layer_list": [3, 5]}, {"num_layer_list": ("3", "5")}),
        ({"virtual_pipeline_model_parallel_size": 2}, {"num_layers_per_virtual_pipeline_stage": 2}),
        ({"num_layer_list": "[[2,2],[2,2]]"}, {"num_layer_list": ("2", "2", "2", "2")}),
        # A row for each rank, as the data pass them: the first virtual stage of both ranks, then the second.
        ({"num_layer_list": "[[4,2],[1,1]]"}, {"num_layer_list": ("4", "1", "2", "1")}),
        (
            {"num_layer_list": [[3, 1], [2, 2]], "virtual_pipeline_model_parallel_size": 2},
            {"num_layer_list": ("3", "2", "1", "2"), "num_layers_per_virtual_pipeline_stage": None},
        ),
        (
            {"num_layer_list": [3, 5], "recompute_config": {"recompute": [1, 0], "select_recompute": [1, 2]}},
            {"recompute_layer_list": ("1", "0"), "select_recompute_layer_list": ("1", "2")},
        ),
        ({"recompute": [3, 1]}, {"recompute_layer_list": ("3", "1"), "recompute_granularity": None}),
        ({"select_recompute": [3, 1], "recompute": False}, {"select_recompute_layer_list": ("3", "1")}),
        (
            {"num_layer_list": [[3, 1], [2, 2]], "recompute": [[2, 1], [0, 2]], "select_recompute": True},
            {"recompute_layer_list": ("2", "0", "1", "2"), "select_recompute_layer_list": ("8",) * 4},
        ),
        ({"recompute": [1, 1, 1]}, "must be 2 numbers of layers"),
        ({"recompute": 3}, "True, False or a list"),
        ({"num_layer_list": [[4, 4]], "virtual_pipeline_model_parallel_size": 2}, "1 rows of [2] for 2 stages"),
        ({"num_layer_list": [4, 4], "virtual_pipeline_model_parallel_size": 2}, "2 numbers for 2 stages"),
        ({"num_layer_list": [3, 4]}, "7 layers are not the 8 of num_layers"),
        ({"num_layer_list": "import os"}, "lists of numbers"),
        ({"num_layer_list": [[2, 2], [2], [2]]}, "rows"),
        ({"virtual_pipeline_model_parallel_size": 3}, "do not divide 8 layers"),
        ({"virtual_pipeline_model_parallel_size": "x"}, "positive integer"),
    ],
)
def test_layers_of_stages(from_file, problem, keys, expected):
    keys = {**PIPELINE, **{f"parallel_config.{key}": value for key, value in keys.items()}}
    if isinstance(expected, str):
        assert expected in problem(keys, "--nproc-per-node", "2")
    else:
        config = from_file(keys, "--nproc-per-node", "2")
        assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"model_config.hiden_size": 3}, "there is no such key. Did you mean model_config.hidden_size?"),
        ({"training_config.learning_rate": 3}, "Did you mean optimizer_config.learning_rate?"),
        ({"model_config.hidden_size": "x"}, "expected int, found 'x'"),
        ({"model_config.hidden_size": 64, "hidden-size": 32}, "contradict each other about --hidden-size"),
        ({"model_config.use_rotary_embedding": True, "model_config.position_embedding_type": "none"}, "contradict"),
        ({"training_config.bf16": True, "model_config.compute_dtype": "float16"}, "contradict"),
        ({"model_config.params_dtype": "float16"}, "computes in float32"),
        ({"model_config.group_query_attention": True}, "num_query_groups"),
        ({"model_config.fp16_lm_cross_entropy": True}, "it needs --fp16"),
        ({"optimizer_config.optimizer_type": "SGD"}, "the optimizer is AdamW"),
        ({"optimizer_config.no_weight_decay_params": ["norm"]}, "cannot be followed"),
        ({"optimizer_config.betas": 0.9}, "two numbers"),
        ({"dataset_config.eos_token_id": 5}, "the tokenizer says"),
        (
            {"dataset_config.batch_size": 2, "dataset_config.micro_batch_num": 3, "global-batch-size": 4},
            "a global batch of 6, but",
        ),
        ({"training_config.profile": True, "training_config.profile_step_end": 3}, "must be above"),
        ({"training_config": 5}, "holds keys; found 5"),
        ({"training_config.resume_training": True}, "needs training_config.load_checkpoint"),
    ],
)
def test_what_mindspeed_says_that_cannot_be_followed(problem, keys, words):
    assert words in problem(keys)


def test_options_of_ours_stand_beside_the_sections_and_the_command_line_wins(from_file):
    keys = {"model_config.hidden_size": 64, "tokenizer-type": "NullTokenizer", "vocab_size": 9, "data-path": "x"}
    config = from_file(keys, "--hidden-size", "128")
    assert (config.hidden_size, config.vocab_size) == (128, 9)
    assert config.origins["hidden_size"] == "command line"


def test_lengths_of_other_schedules_are_zero_in_files_of_mindspeed(from_file):
    keys = {"optimizer_config.lr_decay_samples": 0, "optimizer_config.lr_wsd_decay_iters": 0}
    config = from_file(keys)
    assert config.lr_decay_samples is None and config.lr_wsd_decay_iters is None and len(config.notes) == 2


def test_a_constant_weight_decay_of_mindspeed_may_have_two_equal_ends(from_file, problem):
    ends = {"optimizer_config.start_weight_decay": 0.2, "optimizer_config.end_weight_decay": 0.2}
    assert from_file({**ends, "optimizer_config.weight_decay": 0.1}).weight_decay == 0.2
    assert "--start-weight-decay would be ignored" in problem({"optimizer_config.start_weight_decay": 0.2})


def test_options_of_a_reduction_that_does_not_happen_are_notes(from_file):
    keys = {"training_config.bucket_size": 100, "training_config.overlap_grad_reduce": True}
    config = from_file(keys)
    assert "ddp_bucket_size" not in config.given and len(config.notes) == 2
    two = ("--nproc-per-node", "2", "--global-batch-size", "8")
    config = from_file(keys, *two)
    assert config.ddp_bucket_size == 100 and config.overlap_grad_reduce and not config.notes
    sharded = from_file({**keys, "training_config.use_distributed_optimizer": True}, *two)
    assert not sharded.overlap_grad_reduce and "with ZeRO stage 1 every layer is one bucket" in sharded.notes[0]
    alone = parse(["--ddp-bucket-size", "5", "--use-distributed-optimizer", "--sequence-parallel"], {})
    assert not alone.use_distributed_optimizer and not alone.sequence_parallel and len(alone.notes) == 3


# The MindFormers tutorial


def test_the_tutorials_model(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "32")
    config = parse(["--config", "mindformers-38b", "--data-path", "x"], {})
    # 62 layers on 4 x 4 virtual stages, of which the last has fewer
    assert config.num_layers == 62 and config.num_layer_list == ("4",) * 15 + ("2",)
    assert config.num_layers_per_virtual_pipeline_stage is None and config.padded_vocab_size == 165664
    assert (config.embedding_init_method_std, config.init_method_std) == (0.5, 0.00884)
    assert (config.num_query_groups, config.attn_post_norm_scale, config.bf16) == (8, 0.0447, True)
    assert any("not as heads per group" in note for note in config.notes)
    assert {key.split(".")[0] for key in mindformers.rules()} == set(mindformers.SECTIONS)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("accelerate_config.precision.softmax_compute_dtype", "bfloat16", "in float32 always"),
        ("accelerate_config.precision.residual-connection", "bfloat16", "dtype of compute_dtype, or float32"),
        ("accelerate_config.precision.fused_operators", "flash_attention, magic", "no operator 'magic'"),
        ("model_config.llm.attention.head_num", 4, "Did you mean model_config.llm.blocks.attention?"),
        ("model_config.llm.blocks.attention.attention_type", "MLA", "GQA, MHA or MQA"),
        ("model_config.llm.blocks.ffn.activation", "relu", "'relu' is not one of swiglu"),
        ("train_config.ms_training_config.resume_training", True, "Give --load FOLDER"),
        ("model_config.llm.head.shared_embedding", "maybe", "True or False"),
    ],
)
def test_what_the_tutorial_says_that_cannot_be_followed(problem, key, value, words):
    assert words in problem({key: value})


def test_padding_of_the_tutorial(problem, from_file):
    sizes = {"model_config.llm.tokenizer.padded_size": 1000, "model_config.llm.tokenizer.divided_by": 16}
    assert "1000 is not divisible by 16" in problem(sizes)
    del sizes["model_config.llm.tokenizer.padded_size"]
    assert from_file(sizes).make_vocab_size_divisible_by == 16


# DeepSpeed


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
        (ds(scheduler__type="WarmupLR", scheduler__params={"warmup_max_lr": 1e-3}), "", 'set it to "linear"'),
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
        "activation_checkpointing.cpu_checkpointing": True,
        "wall_clock_breakdown": True,
        "tensorboard.enabled": True,
        "steps_per_print": 20,
        "optimizer.params.max_grad_norm": 0.5,
    }
    config = from_file(content, option="--deepspeed-config")
    assert config.clip_grad == 0.5 and config.log_interval == 10
    assert config.checkpoint_in_cpu
    for key in ("offload_param.device", "wall_clock_breakdown", "tensorboard", "steps_per_print"):
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


def test_anchors_are_followed_within_a_limit(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("num-layers: &n 3\nmicro-batch-size: *n\n")
    assert parse(["--config", str(path)], {}).micro_batch_size == 3
    path.write_text("model_config: &m {hidden_size: 64}\ntraining_config: {<<: *m, seed: 3}\n")
    with pytest.raises(ConfigError, match=r"training_config\.hidden_size: there is no such key"):
        parse(["--config", str(path)], {})
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="expand to more than 100000 values"):
        parse(["--config", str(path)], {})
    path.write_text("a: &a [*a]")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(["--config", str(path)], {})
    path.write_text("num-layers: 2\nnum-layers: 3\n")
    with pytest.raises(ConfigError, match="the key 'num-layers' is here twice"):
        parse(["--config", str(path)], {})


# MindFormers' trainer files

QWEN3 = {
    "seed": 42,
    "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "Qwen3"},
    "runner_config": {"epochs": 2, "batch_size": 1, "gradient_accumulation_steps": 1},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": "1.e-8", "weight_decay": 0.0},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": "1.e-6", "warmup_ratio": 0, "total_steps": -1},
    "train_dataset": {
        "data_loader": {
            "sizes": [8000, 0, 0],
            "config": {"split": "1, 0, 0", "seq_length": 4096, "data_path": ["1", "x"]},
        }
    },
    "parallel_config": {"data_parallel": 1, "model_parallel": 4, "pipeline_stage": 4, "micro_batch_num": 4},
    "recompute_config": {"recompute": True},
    "model": {
        "model_config": {
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "swiglu",
            "seq_length": 4096,
            "rope_theta": 1000000.0,
            "qk_layernorm": True,
            "compute_dtype": "bfloat16",
            "residual_dtype": "bfloat16",
            "offset": [-1, 1, 1, -1],
        }
    },
    "runner_wrapper": {"type": "MFTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True},
    "context": {"device_target": "Ascend"},
}
"""Keys and values of MindFormers' configs/qwen3/pretrain_qwen3_32b_4k.yaml (dev, fd4deeb), with a 16-bit residual."""


def trainer_file(tmp_path, **changes):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**QWEN3, **changes}))
    return path


def test_a_trainer_file_of_mindformers(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "151000"]
    config = parse(["--config", str(trainer_file(tmp_path)), *tokenizer], {})
    assert (config.train_samples, config.train_iters, config.global_batch_size) == (16000, 4000, 4)
    assert (config.swiglu, config.normalization, config.position_embedding_type) == (True, "RMSNorm", "rope")
    assert config.qk_layernorm and config.bf16 and config.num_layer_list == ("15", "17", "17", "15")
    assert config.recompute_granularity == "full" and config.data_path == ("1", "x")


def test_what_a_trainer_file_asks_in_vain_is_said_at_once(tmp_path):
    path = trainer_file(
        tmp_path,
        optimizer={"type": "Lamb"},
        train_dataset={"data_loader": {"dataset_dir": "x"}},
        parallel_config={"expert_parallel": 8},
        frobnicate=1,
    )
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(path)], {})
    for words in ("not one of AdamW", "give --train-iters", "--num-experts", "frobnicate: there is no such key"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"run_mode": "predict"}, "run_mode: 'predict': `hal train` trains"),
        ({"trainer": {"type": "image_classification"}}, "'image_classification': `hal train` trains a GPT"),
        ({"model": {"arch": {"type": "YiZhaoDPO"}}}, "none of the models whose keys are known: LlamaForCausalLM"),
        ({"model": {"model_config": {"pet_config": {"pet_type": "lora"}}}}, "'lora': all weights are trained"),
        ({"moe_config": {"expert_num": 8}}, "8 experts: MindFormers drops tokens"),
    ],
)
def test_another_task_or_model_is_refused_in_one_sentence(tmp_path, changes, words):
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(trainer_file(tmp_path, **changes, frobnicate=1))], {})
    assert words in str(caught.value) and "\n" not in str(caught.value)


LLAMA = {
    "run_mode": "finetune",
    "load_checkpoint": "w",
    "runner_config": {"epochs": 2, "batch_size": 1},
    "optimizer": {"type": "FP32StateAdamWeightDecay", "beta2": 0.95},
    "lr_schedule": {"type": "polynomial", "learning_rate": 1e-5, "warmup_steps": 3, "warmup_ratio": 0.5},
    "train_dataset": {"input_columns": ["input_ids", "labels"], "data_loader": {"type": "MindDataset"}},
    "model": {
        "arch": {"type": "LlamaForCausalLM"},
        "model_config": {
            "type": "LlamaConfig",
            "vocab_size": 32001,
            "checkpoint_name_or_path": "llama2_7b",
            "extend_method": "PI",
            "scaling_factor": 4,
        },
    },
    "runner_wrapper": {"type": "MFTrainOneStepCell"},
}
"""The form of MindFormers' configs/llama2/finetune_llama2_7b.yaml (v1.5.0)."""


def llama_file(tmp_path, *argv, **changes):
    path = tmp_path / "llama.yaml"
    path.write_text(yaml.safe_dump({**LLAMA, **changes}))
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "320"]
    return parse(["--config", str(path), *tokenizer, *argv], {})


def test_a_file_of_mindformers_that_finetunes(tmp_path, monkeypatch):
    config = llama_file(tmp_path, "--data-path", "x")
    assert config.sft and config.num_train_epochs == 2.0 and config.load == "w"
    assert (config.adam_bias_correction, config.adam_eps, config.weight_decay) == (False, 1e-6, 0.0)
    assert (config.lr_decay_style, config.min_lr, config.lr_warmup_fraction) == ("linear", 1e-7, 0.5)
    assert "lr_warmup_iters" not in config.given and config.clip_grad == 0.0
    assert config.rotary_seq_len_interpolation_factor == 4.0
    # The sizes of the class, in MindFormers' models/llama/llama_config.py.
    assert (config.hidden_size, config.num_layers, config.ffn_hidden_size, config.fp16) == (4096, 32, 11008, True)
    assert (config.pad_vocab_size_to, config.mask_padded_vocab) == (32001, False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = llama_file(tmp_path, "--data-path", "x", parallel_config={"model_parallel": 2})
    assert (config.pad_vocab_size_to, config.mask_padded_vocab) == (32002, True)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"type": "linear", "lr_end": 1e-6}, ("linear", 0.0)),  # LinearWithWarmUpLR ends at 0
        ({"type": "CosineWithWarmUpLR", "lr_end": 1e-6}, ("cosine", 1e-6)),
        ({"type": "cosine"}, ("cosine", 0.0)),
        ({"type": "polynomial", "lr_end": 1e-6}, ("linear", 1e-6)),
        ({}, ("constant", 0.0)),
    ],
)
def test_schedules_of_mindformers(tmp_path, changes, expected):
    config = llama_file(tmp_path, "--data-path", "x", lr_schedule={"learning_rate": 1e-5, **changes})
    assert (config.lr_decay_style, config.min_lr) == expected


@pytest.mark.parametrize(
    "wrapper, parallel, norm",
    [
        ({"use_clip_grad": True}, {}, 1.0),
        ({"use_clip_grad": True, "max_grad_norm": 0.5}, {}, 0.5),
        ({"use_clip_grad": False, "max_grad_norm": 0.5}, {}, 0.0),
        ({}, {"gradient_accumulation_steps": 2}, 1.0),
    ],
)
def test_clipping_of_mindformers(tmp_path, wrapper, parallel, norm):
    runner = {"epochs": 2, "batch_size": 1, **parallel}
    assert llama_file(tmp_path, "--data-path", "x", runner_wrapper=wrapper, runner_config=runner).clip_grad == norm


def test_a_glm_of_mindformers(tmp_path):
    model = {
        "type": "ChatGLM2Config",
        "padded_vocab_size": 65024,
        "layernorm_epsilon": 1e-6,
        "rope_ratio": 50,
        "rmsnorm": True,
        "multi_query_group_num": 4,
        "compute_dtype": "bfloat16",
        "fp32_residual_connection": False,
    }
    config = llama_file(
        tmp_path,
        "--data-path",
        "x",
        model={"arch": {"type": "ChatGLM2ForConditionalGeneration"}, "model_config": model},
    )
    assert (config.rotary_percent, config.rotary_interleaved, config.rotary_base) == (0.5, True, 500000.0)
    assert (config.num_query_groups, config.kv_channels, config.ffn_hidden_size) == (4, 128, 13696)
    assert config.fp32_residual_connection and config.qkv_bias and not config.mlp_bias and not config.projection_bias


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


def test_the_environment_gives_way_to_every_file(from_file):
    config = from_file(ds(optimizer__params__lr=1e-3), option="--deepspeed-config", environ={"HAL_LR": "0.5"})
    assert config.lr == 1e-3


# Tests that apply to all front ends


def test_show_prints_every_value_with_its_origin_and_reads_back(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HAL_SEED", "77")
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump(nested({"model_config.hidden_size": 64, "model_config.normalization": "RMSNorm"})))
    argv = ["--config", str(path), "--lr", "1e-4", "--pin", "linear=cpu_ref/c", "--data-path", "0.5", "a", "0.5", "b c"]
    assert main(["config", "show", *argv]) == 0
    out = capsys.readouterr().out
    lines = {line.lstrip("# ").split(":")[0]: line for line in out.splitlines() if ":" in line}
    assert lines["hidden-size"].endswith(f"# --config {path}: model_config.hidden_size")
    assert lines["lr"].endswith("# command line") and lines["seed"].endswith("# HAL_SEED")
    assert lines["num-layers"].startswith("# ") and lines["num-layers"].endswith("# default")
    assert lines["kv-channels"].endswith("# derived")
    (tmp_path / "again.yaml").write_text(out)
    again, first = parse(["--config", str(tmp_path / "again.yaml")], {}), parse(argv)
    assert again == first and again.data_path == ("0.5", "a", "0.5", "b c")


def test_tabs_of_json_are_blanks_and_sections_that_change_results_are_refused_by_name(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n\t"train_batch_size": 8,\n\t"compression_training": {"layer_reduction": {"enabled": true}}\n}')
    with pytest.raises(ConfigError, match="compression_training: dict cannot be followed: weights are not pruned"):
        parse(["--deepspeed-config", str(path)], {})


@pytest.mark.parametrize("name", sorted(p.stem for p in READY.glob("*.yaml")))
def test_show_needs_no_data_and_says_what_a_run_would(name, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["config", "show", "--config", name]) == 0
    out = capsys.readouterr().out
    needed = out.partition("\n# still to be given\n")[2]
    assert ("give --data-path" in needed) == (not name.startswith("tiny"))
    assert ("processes: at least 32" in needed) == (name == "mindformers-38b")
    if not name.startswith("tiny"):
        with pytest.raises(ConfigError, match="give --data-path"):
            parse(["--config", name], {})
    # Errors are reported nevertheless.
    assert main(["config", "show", "--config", name, "--split", "1"]) == 2
    # With the requested option, the printed text is a valid configuration.
    (tmp_path / "shown.yaml").write_text(out)
    if name == "mindformers-38b":
        monkeypatch.setenv("WORLD_SIZE", "32")
    data = [] if name.startswith("tiny") else ["--data-path", "x"]
    assert main(["config", "show", "--config", str(tmp_path / "shown.yaml"), *data]) == 0
    assert "still to be given" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, code", [([], 2), (["--help"], 0), (["print"], 2), (["show", "--config", "absent.yaml"], 2)]
)
def test_wrong_usage_of_show(argv, code, capsys):
    assert main(["config", *argv]) == code


@pytest.mark.parametrize("path", sorted(READY.glob("*.yaml")), ids=lambda p: p.stem)
def test_ready_configurations_are_whole(path, monkeypatch):
    cards = {"mindformers-38b": "32"}.get(path.stem)
    if cards:
        monkeypatch.setenv("WORLD_SIZE", cards)
    data_path = [] if path.stem.startswith("tiny") else ["--data-path", "x"]
    config = parse(["--config", path.stem, *data_path], {})
    assert config.train_iters and not read_config(path.stem).values.keys() - config.given - {
        "ddp_bucket_size",
        "use_distributed_optimizer",
    }


def test_the_command_lines_tokenizer_replaces_that_of_a_file():
    config = parse(
        ["--config", "llama-7b", "--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "m", "--data-path", "x"],
        {},
    )
    assert config.tokenizer_model == "m" and config.vocab_size is None


def test_new_options_do_what_they_say(references):
    config = parse(["--embedding-init-method-std", "0.5", "--pad-vocab-size-to", "512", "--seq-length", "8"], {})
    config.set_vocabulary(257)
    import torch

    model = GPT(config, torch.device("cpu"))
    assert model.embedding.word_embeddings.weight.shape[0] == 512
    assert model.embedding.word_embeddings.weight.std().item() == pytest.approx(0.5, rel=0.05)
    with pytest.raises(ConfigError, match="less than the vocabulary size 600"):
        config.set_vocabulary(600)
    assert parse(["--lr-warmup-fraction", "0.1", "--lr-decay-iters", "50"], {}).lr_warmup_iters == 5
    assert parse(["--warmup", ".01"], {}).lr_warmup_iters == 1
    with pytest.raises(ConfigError, match="contradict"):
        parse(["--warmup", ".01", "--lr-warmup-iters", "4"], {})
