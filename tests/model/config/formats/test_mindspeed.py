"""MindSpeed-Core-MS's sections are converted to HAL's options; unsupported keys are refused, never dropped."""

import pytest
import yaml
from nested_keys import nested

from hal.model.config.command_line import parse, read_config
from hal.model.config.formats import mindspeed
from hal.model.config.schema import ConfigError


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
    assert {key.split(".")[0] for key in mindspeed.rules()} == {*mindspeed.SECTIONS, "moe_config", "lora_config"}
    assert len(list(megatron_arguments())) == 125  # both betas are one list


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
        ({"training_config.grad_clip_kwargs.grad_clip_type": "GradClipByValue"}, "clipped by the norm of all"),
        ({"training_config.loss_func_kwargs.loss_func_type": "MSE"}, "the loss is the cross entropy"),
        ({"model_config.num_layers": 2, "moe_config.num_experts": 4}, "experts are chosen by --num-experts"),
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


def test_sections_of_the_experimental_trainer(from_file):
    """Keys and values of MindFormers' tests/st/test_distri_core/test_parallel_optimizer/config (v1.5.0)."""
    keys = {
        "training_config.grad_clip_kwargs.grad_clip_type": "ClipGlobalNorm",
        "training_config.grad_clip_kwargs.clip_value": 0.5,
        "training_config.loss_func_kwargs.loss_func_type": "CrossEntropyLoss",
        "optimizer_config.zero_config.allreduce_after_grad_accumulation": True,
        "moe_config.num_experts": 1,
        "moe_config.moe_router_topk": 2,
    }
    config = from_file(keys)
    assert config.clip_grad == 0.5 and len(config.notes) == 2
