"""A converted model has the logits of transformers' GPT-2 and Llama; options without a counterpart are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT2, LLAMA, TOKENS, VOCABULARY, assert_equal_weights, hal_logits, random_weights

from hal import HalError
from hal.model.apps.convert import hal_format, huggingface

pytest.importorskip("safetensors", reason="needs safetensors (extra: convert)")
transformers = pytest.importorskip("transformers", reason="needs transformers (extra: convert)")

SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}


def theirs(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(**SMALL, n_positions=16, n_embd=32, n_layer=2, n_head=4, **more)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**{**SMALL, **sizes, "max_position_embeddings": 16, **more})
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():  # far from the flat start, biases and norms included
            p.add_(0.15 * torch.randn(p.shape))
    return model.eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(TOKENS).logits.float()


CASES = {
    "gpt2": ("gpt2", {}),
    "gpt2-untied-exact-gelu": ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 40}),
    "llama": ("llama", {}),
    "llama-grouped-biased-tied": (
        "llama",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "gpt2" else pytest.mark.slow) for c in CASES])
def test_logits_are_those_of_transformers_both_ways(case: str, tmp_path: Path, cpu_ref: Any) -> None:
    kind, more = CASES[case]
    model = theirs(kind, **more)
    model.save_pretrained(tmp_path / "theirs")
    weights = huggingface.read(tmp_path / "theirs")
    hal_format.write(weights, tmp_path / "ours")
    torch.testing.assert_close(hal_logits(tmp_path / "ours"), logits_of(model), rtol=2e-5, atol=2e-5)
    # In the other direction, transformers loads it without missing or unexpected names and gives the same logits.
    back = hal_format.read(tmp_path / "ours")
    assert_equal_weights(weights, back)
    huggingface.write(back, tmp_path / "back")
    again, report = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert torch.equal(logits_of(again.eval()), logits_of(model))


def test_interleaved_rotary_pairs_are_reordered(tmp_path: Path, cpu_ref: Any) -> None:
    weights = random_weights({**LLAMA, "rotary_interleaved": True})
    hal_format.write(weights, tmp_path / "ours")
    huggingface.write(weights, tmp_path / "theirs")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    torch.testing.assert_close(hal_logits(tmp_path / "ours"), logits_of(model), rtol=2e-5, atol=2e-5)


def test_precision_is_kept(tmp_path: Path, cpu_ref: Any) -> None:
    weights = random_weights(GPT2, dtype=torch.bfloat16)
    hal_format.write(weights, tmp_path / "ours")
    back = hal_format.read(tmp_path / "ours")
    assert back.dtype == torch.bfloat16
    huggingface.write(back, tmp_path / "theirs")
    assert_equal_weights(huggingface.read(tmp_path / "theirs"), weights)
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "theirs").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options, reason",
    [
        ({**GPT2, "normalization": "RMSNorm"}, "not gpt2, because of --normalization RMSNorm"),
        (
            {**LLAMA, "pre_tokens": 4, "add_qkv_bias": True, "qk_layernorm": True},
            "not qwen2, because of --qk-layernorm",
        ),
        ({**LLAMA, "rotary_percent": 0.5, "add_qkv_bias": True}, "not phi3, because of --add-qkv-bias"),
        ({**LLAMA, "rotary_interleaved": True, "qk_layernorm": True}, "not qwen3, because of --rotary-interleaved"),
        ({**GPT2, "use_sandwich_norm": True}, "--use-sandwich-norm"),
        ({**GPT2, "gelu_approximate": "fast"}, "--gelu-approximate fast"),
    ],
)
def test_a_model_they_cannot_express_is_refused(options: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(HalError, match=reason):
        huggingface.write(random_weights(options), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def _folder(tmp_path: Path, kind: str = "llama") -> Path:
    theirs(kind).save_pretrained(tmp_path / kind)
    return tmp_path / kind


@pytest.mark.parametrize(
    "kind, change, reason",
    [
        ("llama", {"model_type": "bert"}, "a model of type 'bert'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "scaled by 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "attention_factor": 1.5}}, "attention_factor = 1.5"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}}, "mscale_all_dim without mscale"),
        # Older files have these keys beside, or instead of, rope_parameters.
        ("llama", {"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_scaling: factor should be a number"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 4.0}, "rope_parameters": None}, "scaled by 'ntk'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "scaled by 'dynamic'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}, "rope_parameters": None},
            "low_freq_factor = 2.0",
        ),
        ("llama", {"rope_scaling": {"factor": 4.0}}, "factor = 4.0"),
        ("llama", {"rope_parameters": {"rope_type": "default", "type": "dynamic"}}, "scaled by 'dynamic'"),
        ("llama", {"rope_parameters": "x"}, "rope_parameters should be an object"),
        ("llama", {"rope_parameters": {"rope_theta": "abc"}}, "rope_parameters: rope_theta should be a number"),
        ("llama", {"rope_theta": "abc", "rope_parameters": None}, "rope_theta should be a number"),
        ("llama", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta should be a number"),
        ("llama", {"attention_multiplier": 0.5}, "attention_multiplier = 0.5"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier = 0.2"),
        ("llama", {"embedding_multiplier": 12}, "embedding_multiplier = 12"),
        ("llama", {"sliding_window": 8}, "has no sliding window"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"attention_bias": "no"}, "attention_bias should be true or false"),
        ("llama", {"model_type": []}, r"a model of type \[\]"),
        ("llama", {"attention_bias": True}, r"no tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ("llama", {"num_hidden_layers": "two"}, "num_hidden_layers should be a number"),
        ("llama", {"num_hidden_layers": 3}, "no tensor 'model.layers.2"),
        ("llama", {"num_hidden_layers": 10**12}, "no tensor"),
        ("llama", {"num_hidden_layers": 1}, "tensors that do not belong to a llama model"),
        ("llama", {"intermediate_size": 49}, "linear_fc1.weight has shape"),
        ("llama", {"num_attention_heads": 3}, "shape|divisible"),
        ("llama", {"num_key_value_heads": 3}, "shape|divisible"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("gpt2", {"tie_word_embeddings": False}, "no tensor 'lm_head.weight'"),
        ("gpt2", {"n_embd": -4}, "should be a count"),
    ],
)
def test_a_model_hal_cannot_express_is_refused(kind: str, change: Any, reason: str, tmp_path: Path) -> None:
    path = _folder(tmp_path, kind) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(HalError, match=reason):
        huggingface.read(path.parent)


def test_fields_of_relatives_that_change_nothing_are_no_obstacle(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    whole, path = huggingface.read(folder), folder / "config.json"
    more = {"rope_scaling": None, "logits_scaling": 1.0, "sliding_window": 4, "use_sliding_window": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more, "rope_parameters": None, "rope_theta": 1e4}))
    assert_equal_weights(huggingface.read(folder), whole)
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_sliding_window": None, "sliding_window": 16}))
    assert_equal_weights(huggingface.read(folder), whole)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for content in (b"", whole[:7], whole[:200], whole[:-5], b"\xff" * 8 + whole[8:], b"\x80\x02}q\x00." * 50):
        path.write_bytes(content)
        with pytest.raises(HalError, match=r"model.safetensors is not a safetensors file"):
            huggingface.read(folder)
    path.unlink()
    with pytest.raises(HalError, match="does not exist"):
        huggingface.read(folder)
    for config in ("", "[1]", "[" * 100_000, '{"model_type": "llama"'):
        (folder / "config.json").write_text(config)
        with pytest.raises(HalError, match=r"config.json (cannot be read|is not a JSON|is not valid JSON|is nested)"):
            huggingface.read(folder)


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    whole = huggingface.read(folder).tensors
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    names = json.dumps({"weight_map": dict.fromkeys(["lm_head.weight"], "part-1.safetensors")})
    index.write_text(names)
    assert set(huggingface.read(folder).tensors) == set(whole)
    for name, reason in (
        ("../x.safetensors", "not safetensors files in its folder"),
        ("x.bin", "not safetensors files"),
    ):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        with pytest.raises(HalError, match=reason):
            huggingface.read(folder)
    index.write_text(json.dumps({"weight_map": {"another": "part-1.safetensors"}}))
    with pytest.raises(HalError, match="lists 1 tensors that no file contains"):
        huggingface.read(folder)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_pickles_are_not_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": _Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(HalError, match=r"only in pickles \(pytorch_model.bin\)"):
        huggingface.read(folder)
    assert not (tmp_path / "ran").exists()
