"""Every family of Hugging Face models with random weights, against transformers' own module: equal logits, gradients
and greedy text, and identical tensors after a round trip through a checkpoint of HAL."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from models import assert_equal_weights
from torch import Tensor

from hal.model.apps.convert import family_weights, hal_format, huggingface
from hal.model.apps.convert.families import FAMILIES
from hal.model.apps.convert.safetensors_files import read_config, read_tensors
from hal.model.apps.convert.safetensors_files import write as write_files
from hal.model.gpt.model import GPT
from hal.model.inference.load import open_pretrained

pytest.importorskip("safetensors", reason="needs safetensors (extra: convert)")
transformers = pytest.importorskip("transformers", reason="needs transformers (extra: convert)")

VOCABULARY, LENGTH = 96, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
GPT2 = {
    **{n: SIZES[n] for n in ("vocab_size", "attn_implementation", "bos_token_id", "eos_token_id", "pad_token_id")},
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.5, 9.0],
    "partial_rotary_factor": 0.75,
}
DEEPSEEK = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_parameters": YARN,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "GPT2", GPT2),
    "gpt2-untied-exact-gelu": ("gpt2", "GPT2", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "llama": ("llama", "Llama", GROUPED),
    "llama-biased-tied": (
        "llama",
        "Llama",
        {**GROUPED, "head_dim": 12, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3": ("llama", "Llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama-interpolated": (
        "llama",
        "Llama",
        {**GROUPED, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    ),
    "mistral": ("mistral", "Mistral", {**GROUPED, "sliding_window": 5, "head_dim": 12, "rope_parameters": ROPE}),
    "qwen2": ("qwen2", "Qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen2-some-layers": (
        "qwen2",
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", "Qwen3", {**GROUPED, "head_dim": 12, "attention_bias": True, "rope_parameters": ROPE}),
    "qwen3-yarn": (
        "qwen3",
        "Qwen3",
        {
            **GROUPED,
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 0.5,
            },
        },
    ),
    "phi3": ("phi3", "Phi3", {**GROUPED, "sliding_window": 5}),
    "phi3-partial": ("phi3", "Phi3", {**GROUPED, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    # Greedy text becomes longer than the sequences before the extension.
    "phi3-longrope": (
        "phi3",
        "Phi3",
        {**GROUPED, "rope_parameters": LONGROPE, "original_max_position_embeddings": 12},
    ),
    "phi3-longrope-short": (
        "phi3",
        "Phi3",
        {**GROUPED, "rope_parameters": {**LONGROPE, "factor": 3.0}, "original_max_position_embeddings": 24},
    ),
    "gpt_neox": ("gpt_neox", "GPTNeoX", {**SIZES, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "gpt_neox-one-after-the-other": (
        "gpt_neox",
        "GPTNeoX",
        {
            **SIZES,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
    ),
    "gemma": ("gemma", "Gemma", {**GROUPED, "head_dim": 12, "attention_bias": True, "rope_parameters": ROPE}),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "rope_parameters": ROPE,
        },
    ),
    "gemma2-uncapped": (
        "gemma2",
        "Gemma2",
        {
            **GROUPED,
            "head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu",
        },
    ),
    "gemma2-without-windows": ("gemma2", "Gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 4096}),
    "granite": (
        "granite",
        "Granite",
        {
            **GROUPED,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
            "attention_bias": True,
        },
    ),
    "smollm3": ("smollm3", "SmolLM3", {**GROUPED, "no_rope_layer_interval": 2, "rope_parameters": ROPE}),
    "smollm3-window": (
        "smollm3",
        "SmolLM3",
        {**GROUPED, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5},
    ),
    "arcee": ("arcee", "Arcee", {**GROUPED, "head_dim": 12, "mlp_bias": True}),
    "nemotron": ("nemotron", "Nemotron", {**GROUPED, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "stablelm": ("stablelm", "StableLm", {**GROUPED, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}),
    "stablelm-biased": ("stablelm", "StableLm", {**GROUPED, "use_qkv_bias": True}),
    "starcoder2": ("starcoder2", "Starcoder2", {**GROUPED, "sliding_window": 5, "rope_parameters": ROPE}),
    "starcoder2-unbiased": ("starcoder2", "Starcoder2", {**GROUPED, "use_bias": False}),
    "gpt_bigcode": ("gpt_bigcode", "GPTBigCode", GPT2),
    "gpt_bigcode-all-heads": ("gpt_bigcode", "GPTBigCode", {**GPT2, "multi_query": False}),
    "mixtral": ("mixtral", "Mixtral", {**GROUPED, "num_local_experts": 8, "rope_parameters": ROPE}),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3Moe",
        {
            **GROUPED,
            "head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    "qwen3_moe-normalised": (
        "qwen3_moe",
        "Qwen3Moe",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", DEEPSEEK),
    "deepseek_v3-plain": (
        "deepseek_v3",
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "rope_parameters": ROPE,
        },
    ),
}
TOKENS = torch.randint(2, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def model_of(name: str, options: dict[str, Any]) -> Any:
    """transformers' model with every parameter and buffer of the weights random."""
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**options))
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, torch.nn.Parameter) or key.endswith("e_score_correction_bias"):
                tensor.add_(0.15 * torch.randn(tensor.shape))
    return model.eval()


def gradients(model: Any, weights: Tensor, folder: Path) -> dict[str, Tensor]:
    """The gradients of (logits * weights).mean() under HAL's names."""
    (model(TOKENS).logits * weights).mean().backward()
    carrier = copy.deepcopy(model)
    with torch.no_grad():
        for (_, p), (_, q) in zip(carrier.named_parameters(), model.named_parameters(), strict=True):
            p.copy_(q.grad)
    carrier.save_pretrained(folder)
    return dict(huggingface.read(folder).tensors)


SLOW = (
    "deepseek_v3",
    "granite",
    "smollm3",
    "gpt2-untied-exact-gelu",
    "llama-biased-tied",
    "gpt_neox-one-after-the-other",
    "qwen2",
    "phi3",
    "mistral",
    "gpt2",
)
NIGHTLY = (
    "deepseek_v3-plain",
    "qwen3_moe-normalised",
    "llama-interpolated",
    "qwen3-yarn",
    "phi3-longrope",
    "phi3-longrope-short",
    "phi3-partial",
    "qwen2-window",
    "qwen2-some-layers",
    "gemma",
    "gemma2-uncapped",
    "gemma2-without-windows",
    "smollm3-window",
    "arcee",
    "nemotron",
    "stablelm",
    "stablelm-biased",
    "starcoder2",
    "starcoder2-unbiased",
    "gpt_bigcode",
    "gpt_bigcode-all-heads",
)
LONGER = {**dict.fromkeys(SLOW, pytest.mark.slow), **dict.fromkeys(NIGHTLY, pytest.mark.nightly)}


@pytest.mark.parametrize("case", [pytest.param(c, marks=LONGER.get(c, ())) for c in CASES])
def test_a_family(case: str, tmp_path: Path, cpu_ref: Any) -> None:
    kind, name, options = CASES[case]
    theirs = model_of(name, options)
    theirs.save_pretrained(tmp_path / "theirs")
    weights = huggingface.read(tmp_path / "theirs")

    # Logits and gradients.
    scale = torch.randn(2, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(2))
    expected = gradients(theirs, scale, tmp_path / "gradients")
    mine = GPT(weights.config(make_vocab_size_divisible_by=1), torch.device("cpu"))
    mine.load_state_dict(dict(weights.tensors))
    logits, right = mine(TOKENS).transpose(0, 1), theirs(TOKENS).logits
    (logits * scale).mean().backward()
    torch.testing.assert_close(logits, right, rtol=2e-5, atol=2e-5 * right.abs().max().item())
    for parameter, p in mine.named_parameters():
        assert p.grad is not None
        largest = expected[parameter].abs().max().item()
        assert largest > 0.0, parameter
        torch.testing.assert_close(p.grad, expected[parameter], rtol=1e-4, atol=5e-5 * largest, msg=parameter)

    # Greedy text, from the checkpoint.
    hal_format.write(weights, tmp_path / "ours")
    engine = open_pretrained({"backend": "cpu_ref", "load": str(tmp_path / "ours")}).engine
    ids, given = TOKENS[:1, :8], TOKENS[:1, :8]
    for _ in range(8):
        step = engine.forward(ids)
        assert step is not None
        ids = torch.cat([ids, step[-1, :, :VOCABULARY].argmax(-1)[:, None]], 1)
    text = theirs.generate(given, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert text.shape[1] == 16 or text[0, -1] == theirs.config.eos_token_id
    assert ids[:, : text.shape[1]].tolist() == text.tolist()

    # Back: the same tensors, under the same names, and transformers finds all of them.
    back = hal_format.read(tmp_path / "ours")
    assert_equal_weights(weights, back)
    assert back.options["mask_padded_vocab"] is True
    huggingface.write(back, tmp_path / "back", model_type=kind)
    before, after = read_tensors(tmp_path / "theirs"), read_tensors(tmp_path / "back")
    assert set(before) == set(after)
    assert all(torch.equal(before[n], after[n]) for n in before)
    again, report = type(theirs).from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[f"{n}_keys"] for n in ("missing", "unexpected", "mismatched")), report
    assert torch.equal(again.eval()(TOKENS).logits, right)


def test_every_family_has_a_case() -> None:
    assert {kind for kind, _, _ in CASES.values()} == set(FAMILIES)


def test_what_is_alive_is_counted() -> None:
    with LiveBytes() as counted:
        first = torch.zeros(100)
        view = first[:50]
        del first
        second = torch.ones(10)
        del view
        torch.ones(60)
        del second
    assert counted.peak == 440


@pytest.mark.slow
def test_a_conversion_holds_about_one_tensor_at_a_time(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    model_of("Llama", {**GROUPED, **sizes}).save_pretrained(tmp_path / "theirs")
    total = sum(meta.nbytes for meta in read_tensors(tmp_path / "theirs").metas.values())
    largest = 2 * 1024 * 256 * 4  # linear_fc1, which is made of gate_proj and up_proj
    assert total > 20 * largest
    with LiveBytes() as reading:
        hal_format.write(huggingface.read(tmp_path / "theirs"), tmp_path / "ours")
    # The tensor, the parts that it is made of, and a copy in another order of rows.
    assert largest <= reading.peak <= 3 * largest
    with LiveBytes() as writing:
        huggingface.write(hal_format.read(tmp_path / "ours"), tmp_path / "back")
    assert largest <= writing.peak <= 3 * largest


def test_large_models_are_written_in_several_files(tmp_path: Path) -> None:
    theirs = model_of("Llama", GROUPED)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    weights = huggingface.read(tmp_path / "theirs")
    family = FAMILIES["llama"]
    config = weights.config(make_vocab_size_divisible_by=1)
    with write_files(tmp_path / "x", read_config(tmp_path / "theirs"), huggingface.groups(family, weights), 20_000):
        pass
    names = {p.name for p in (tmp_path / "x").glob("*.safetensors")}
    assert len(names) > 3 and f"model-00001-of-{len(names):05d}.safetensors" in names
    assert all(p.stat().st_size < 22_000 for p in (tmp_path / "x").glob("*.safetensors"))
    assert not family_weights.reasons_against(family, config)
    assert_equal_weights(huggingface.read(tmp_path / "x"), weights)
    again = type(theirs).from_pretrained(tmp_path / "x", attn_implementation="eager").eval()
    assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)
