"""A GPT in plain torch, which computes the same function as HAL's default GPT with torch's operations.

Pre-norm, learned positions, tanh gelu, biases, tied embedding, no dropout. Activations are [b, s, h].
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..harness.case import Thunk


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(h, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, s, h))
        y: Tensor = self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))
        return x + y


class PlainGPT(nn.Module):
    """tokens [b, s], labels [b, s] -> mean cross entropy."""

    def __init__(self, vocabulary: int, length: int, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


_NAMES = {
    "norm1": "input_layernorm",
    "norm2": "pre_mlp_layernorm",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
"""The plain model's layers and HAL's."""


def with_weights_of(gpt: Any) -> PlainGPT:
    """The plain model with copies of the weights of HAL's default GPT, in float32, on the same device.

    HAL orders the rows of QKV by head, the plain model by kind.
    """
    config, theirs = gpt.config, dict(gpt.named_parameters())
    layers, heads, words = config.num_layers, config.num_attention_heads, "embedding.word_embeddings.weight"
    vocabulary, hidden = theirs[words].shape
    plain = PlainGPT(vocabulary, config.seq_length, layers, hidden, heads).to(theirs[words].device)
    state = {
        "words.weight": theirs[words],
        "positions.weight": theirs["embedding.position_embeddings.weight"],
        "norm.weight": theirs["decoder.final_layernorm.weight"],
        "norm.bias": theirs["decoder.final_layernorm.bias"],
    }
    for n, (ours, name) in itertools.product(range(layers), _NAMES.items()):
        for kind in ("weight", "bias"):
            t = theirs[f"decoder.layers.{n}.{name}.{kind}"]
            by_kind = t.view(heads, 3, -1, *t.shape[1:]).transpose(0, 1).reshape(t.shape) if ours == "qkv" else t
            state[f"blocks.{n}.{ours}.{kind}"] = by_kind
    plain.load_state_dict(state)
    return plain


def step_of(
    model: nn.Module, tokens: Tensor, labels: Tensor, *, bf16: bool, compiled: bool, mode: str | None = None
) -> Thunk:
    """A function that does one training step: forward (under autocast if bf16), backward, fused AdamW.

    mode: of torch.compile; "reduce-overhead" replays CUDA graphs.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    function = torch.compile(model, dynamic=False, mode=mode) if compiled else model
    device = tokens.device.type

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = function(tokens, labels)
        loss.backward()
        optimizer.step()

    return step
