"""MindFormers' trainer files: pretraining, finetuning, and what is refused in one sentence."""

import pytest
import yaml

from hal.model.config.command_line import parse
from hal.model.config.schema import ConfigError

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
        ({"model": {"arch": {"type": "TelechatForCausalLM"}}}, "the last layer of its MLP has a bias"),
        (
            {"model": {"arch": {"type": "Baichuan13BV2ForCausalLM"}}},
            "NormHead), which HAL's does not; its positions are",
        ),
        ({"model": {"arch": {"type": "YiZhaoDPO"}}}, "none of the models whose keys are known: LlamaForCausalLM"),
        (
            {"model": {"model_config": {"pet_config": {"pet_type": "lora"}}}},
            "cannot be followed: all weights are trained",
        ),
        ({"model": {"arch": {"type": ["LlamaForCausalLM"]}}}, "model.arch.type: expected the name of one class"),
        ({"model": {"model_config": {"type": ["LlamaConfig"]}}}, "model.model_config.type: expected the name of one"),
        ({"moe_config": {"expert_num": 8}}, "moe_config.expert_num: 8 experts: MindFormers drops tokens"),
        ({"model": {"model_config": {"n_routed_experts": 16, "topk_group": 2}}}, "n_routed_experts: 16 experts"),
        ({"model": {"model_config": {"v_head_dim": 8}}}, "v_head_dim: 8 cannot be followed: latent attention is"),
    ],
)
def test_another_task_or_model_is_refused_beside_the_other_problems(tmp_path, changes, words):
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(trainer_file(tmp_path, **changes, frobnicate=1))], {})
    assert words in str(caught.value) and "frobnicate: there is no such key" in str(caught.value)
    assert "topk_group" not in str(caught.value)


def test_a_warm_up_is_not_compared_with_a_length_that_is_not_known(tmp_path):
    """configs/gpt2/pretrain_gpt2_13b_fp16.yaml (v1.5.0) has epochs of data of unknown size, and 2000 warm-up steps."""
    changes = {
        "train_dataset": {"data_loader": {"dataset_dir": "x"}},
        "lr_schedule": {"warmup_steps": 2000, "total_steps": -1},
    }
    with pytest.raises(ConfigError, match="give --train-iters") as caught:
        llama_file(tmp_path, **changes)
    assert "lr-warmup-iters" not in str(caught.value)


def test_logging_of_losses_and_repeatable_kernels_are_noted(tmp_path):
    config = llama_file(tmp_path, "--data-path", "x", print_separate_loss=True, train_precision_sync=True)
    notes = " ".join(config.notes)
    assert "print_separate_loss" in notes and "train_precision_sync" in notes


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
    assert any("ids beyond the tokenizer" in note for note in config.notes)
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


def test_a_qwen_of_mindformers(tmp_path):
    """Keys of research/qwen/finetune_qwen_7b_bf16.yaml (v1.3.2), of which some say what the model does not read."""
    model = {
        "type": "QwenConfig",
        "vocab_size": 151936,
        "intermediate_size": 11008,
        "rotary_pct": 0.5,
        "rotary_emb_base": 500,
        "kv_channels": 64,
        "qkv_has_bias": False,
        "compute_dtype": "bfloat16",
    }
    model = {"arch": {"type": "QwenForCausalLM"}, "model_config": model}
    config = llama_file(tmp_path, "--data-path", "x", model=model)
    assert (config.rotary_percent, config.rotary_base, config.kv_channels, config.swiglu) == (1.0, 10000.0, 128, True)
    assert config.untie_embeddings_and_output_weights and config.qkv_bias
    assert not config.mlp_bias and not config.projection_bias
    assert sum("QwenForCausalLM does not read it" in note for note in config.notes) == 4


def test_an_epsilon_before_the_correction(tmp_path):
    """The optimizer of research/qwen/optim.py and research/yi (v1.3.2)."""
    config = llama_file(tmp_path, "--data-path", "x", optimizer={"type": "AdamWeightDecayX", "beta1": 0.8})
    assert (config.adam_bias_correction, config.adam_eps_before_correction) == (True, True)
    assert (config.adam_eps, config.adam_beta1) == (1e-8, 0.8)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"optimizer": {"type": "Came"}}, "'Came' is not one of AdamW, AdamWeightDecay"),
        ({"pretrained_model_dir": "x"}, "'x' cannot be followed: the model is described by the config.json"),
    ],
)
def test_what_a_trainer_file_leaves_to_others_is_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        llama_file(tmp_path, "--data-path", "x", **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": "Qwen3MoeForCausalLM"}, "'Qwen3MoeForCausalLM' is none of the models whose keys are known"),
        ({"architectures": ["Other", "Qwen3ForCausalLM"]}, "'Other' is none of"),
        ({"qk_layernorm": False}, "always has these norms"),
        ({}, "Qwen3ForCausalLM has defaults for rms_norm_eps that HAL does not have"),
    ],
)
def test_classes_whose_defaults_or_keys_are_not_known(tmp_path, changes, message):
    """modeling_qwen3_train.py of r1.7.0 passes qk_layernorm=True whatever the file has."""
    known = {"architectures": ["Qwen3ForCausalLM"], **({"rms_norm_eps": 1e-6} if changes else {})}
    model = {"model_config": {**QWEN3["model"]["model_config"], **known, **changes}}
    with pytest.raises(ConfigError, match=message):
        parse(["--config", str(trainer_file(tmp_path, model=model))], {})


@pytest.mark.parametrize("section", [["architectures"], "Qwen3ForCausalLM", 3])
def test_a_model_config_that_is_no_section_is_refused(tmp_path, section):
    with pytest.raises(ConfigError, match="model_config"):
        parse(["--config", str(trainer_file(tmp_path, model={"model_config": section}))], {})
