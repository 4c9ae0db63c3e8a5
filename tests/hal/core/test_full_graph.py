"""Third-party models on HAL's ops as one graph: a nanoGPT and a Llama of transformers, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hal
from hal import Rng, TensorRng, ops


@pytest.fixture(autouse=True)
def fresh() -> None:
    hal.use("cpu_ref")
    torch._dynamo.reset()


class Block(nn.Module):
    """nanoGPT's block, with HAL's ops: x + dropout(attention(norm(x))), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, rng: Rng | TensorRng) -> Tensor:
        y = ops.layer_norm(x, self.norm1.weight, self.norm1.bias, 1e-5)
        q, k, v = ops.linear(y, self.qkv.weight, self.qkv.bias).split(x.shape[-1], -1)
        y = ops.flash_attention(
            q, k, v, layout="BSH", num_heads=self.heads, next_tokens=0, dropout_p=0.1, rng=rng.fork("attention")
        )
        y = ops.linear(y, self.proj.weight)
        x = ops.bias_dropout_add(y, self.proj.bias, x, p=0.1, rng=rng.fork("residual"))
        y = ops.layer_norm(x, self.norm2.weight, self.norm2.bias, 1e-5)
        y = ops.bias_gelu(ops.linear(y, self.up.weight), self.up.bias)
        return x + ops.linear(y, self.down.weight, self.down.bias)


class NanoGPT(nn.Module):
    def __init__(self, vocabulary: int = 65, length: int = 16, width: int = 32) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, labels: Tensor, rng: Rng | TensorRng) -> Tensor:
        x = ops.embedding(self.words.weight, tokens) + self.positions.weight[: tokens.shape[1]]
        x = ops.dropout(x, 0.1, rng.fork("embedding"))
        for n, block in enumerate(self.blocks):
            x = block(x, rng.fork("block", n))
        x = ops.layer_norm(x, self.norm.weight, self.norm.bias, 1e-5)
        return ops.linear_cross_entropy(x, self.words.weight, labels).mean()


def grads(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.slow
def test_a_nanogpt_is_one_graph_and_equals_eager() -> None:
    torch.manual_seed(0)
    model = NanoGPT()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(2):
        tokens, labels = torch.randint(0, 65, (2, 2, 16), generator=torch.Generator().manual_seed(step))
        expected = model(tokens, labels, Rng(step))
        got = compiled(tokens, labels, TensorRng.of(Rng(step)))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        for a, b in zip(grads(model, got), grads(model, expected)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def hal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """transformers' attention interface, causal: heads first, the result [b, s, n, d]."""
    y = ops.flash_attention(
        query, key, value, layout="BNSD", num_kv_heads=key.shape[1], scale=options["scaling"], next_tokens=0
    )
    return y.transpose(1, 2), None


@pytest.mark.nightly
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_llama_of_transformers_is_one_graph_and_equals_eager(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    transformers.AttentionInterface.register("hal_test", hal_attention)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=tokens, labels=tokens).loss
    expected_grads = grads(model, expected)
    model.set_attn_implementation("hal_test")
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward", lambda self, x: ops.rms_norm(x, self.weight, self.variance_epsilon)
    )
    got = torch.compile(model, fullgraph=True, backend=compiler)(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads(model, got), expected_grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
