"""The file of MindFormers' tutorial, whose model_config has an llm section."""

import pytest

from hal.model.config.command_line import parse
from hal.model.config.formats import mindformers


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
