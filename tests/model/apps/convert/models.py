"""Random weights in every format, and the logits of a HAL checkpoint, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from model_options import DEEPSEEK_OPTIONS, LATENT_OPTIONS, LLAMA_OPTIONS
from torch import Tensor

from hal.model.apps.convert.weights import Weights
from hal.model.config.schema import Config
from hal.model.gpt.model import GPT
from hal.model.inference.load import open_pretrained

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "init_method_std": 0.2}
GPT2: dict[str, Any] = {**SIZES}
LLAMA: dict[str, Any] = {
    **SIZES,
    **LLAMA_OPTIONS,
    "hidden_dropout": 0.0,  # for which Hugging Face has no option
    "ffn_hidden_size": 48,
    "num_query_groups": 2,
}
MIXTRAL: dict[str, Any] = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 24, "qk_layernorm": True}
DEEPSEEK: dict[str, Any] = {
    **{name: value for name, value in LLAMA.items() if name != "num_query_groups"},
    **DEEPSEEK_OPTIONS,
    **LATENT_OPTIONS,
    "rope_type": "yarn",
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": "[0, 1]",
}
VOCABULARY = 101
TOKENS = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


def random_weights(
    options: dict[str, Any], vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float32
) -> Weights:
    """A GPT with every parameter random (biases and norms too), as Weights."""
    config = Config(**options, make_vocab_size_divisible_by=1)
    config.set_vocabulary(vocabulary)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, p in GPT(config, torch.device("cpu")).state_dict().items():
        noise = torch.randn(p.shape, generator=generator)
        value = (1.0 if "layernorm.weight" in name else 0.0) + 0.2 * noise
        tensors[name] = value if name.endswith("expert_bias") else value.to(dtype)
    return Weights(dict(options), tensors)


@torch.no_grad()
def hal_logits(root: Path, **given: Any) -> Tensor:
    """Logits [b, s, v] of TOKENS by the checkpoint in `root`, without padding."""
    model = open_pretrained({"backend": "cpu_ref", "load": str(root), **given})
    logits = model.engine.forward(TOKENS)
    assert logits is not None
    return logits.transpose(0, 1)[..., :VOCABULARY].float()


def assert_equal_weights(a: Weights, b: Weights) -> None:
    """Asserts that two models are equal, bit for bit."""
    assert set(a.tensors) == set(b.tensors)
    for name in a.tensors:
        assert torch.equal(a.tensors[name], b.tensors[name]), name
    one, other = (w.config(make_vocab_size_divisible_by=1, tokenizer_type="ByteTokenizer") for w in (a, b))
    for option in vars(one):
        # mask_padded_vocab is always on in models that were read from Hugging Face's format.
        ignored = ("given", "padded_vocab_size", "vocab_size", "vocab_file", "merge_file", "tokenizer_model")
        if option not in (*ignored, "mask_padded_vocab"):
            assert getattr(one, option) == getattr(other, option), option
