"""Small random models of transformers' families, and what training and generating with them gives."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 99,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen3": ("Qwen3", {**_LLAMA, "head_dim": 8}),
    "gemma": ("Gemma", {**_LLAMA, "head_dim": 8}),
    "gemma2": ("Gemma2", {**_LLAMA, "head_dim": 8, "sliding_window": 6}),  # soft caps, and windows in every other layer
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 4, "sliding_window": 6}),
    "gpt_oss": (  # sinks
        "GptOss",
        {
            **_LLAMA,
            "head_dim": 8,
            "num_local_experts": 4,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "bert": ("Bert", {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}


def model(family: str, **more: Any) -> Any:
    """The model of a family with eager attention and the same random weights at each call."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**options, **more}, attn_implementation="eager")
    head = {"gpt2": "LMHeadModel", "bert": "ForMaskedLM"}.get(family, "ForCausalLM")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{head}")(config)


def batch(padded: bool) -> dict[str, Tensor]:
    """Two rows of 20 ids. padded: the first row has 7 padding tokens on its left, the second 4 on its right.

    No label is predicted from a padding token: such a query sees nothing, for which HAL gives 0 and eager the mean.
    """
    ids = torch.randint(3, 99, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :7] = 0
        mask[1, -4:] = 0
    known = mask.bool() & mask.roll(1, dims=1).bool() if padded else mask.bool()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~known, -100)}


def train(model: Any, inputs: dict[str, Tensor], steps: int = 20) -> list[float]:
    """The losses of some steps of gradient descent with momentum."""
    model.train()
    inputs = {name: t.to(model.device) for name, t in inputs.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def generate(model: Any, inputs: dict[str, Tensor], count: int = 15) -> list[list[int]]:
    """Greedy continuations of the first ten ids of each row (all of which are left-padded or unpadded)."""
    model.eval()
    prompt = {name: inputs[name][:, :10].to(model.device) for name in ("input_ids", "attention_mask")}
    result = model.generate(**prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    ids: list[list[int]] = result.tolist()
    return ids
