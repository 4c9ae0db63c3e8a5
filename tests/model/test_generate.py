"""Generated text: a function of the seed, likeliest tokens at temperature 0, never an id outside the tokenizer."""

import pytest
import torch

import hal
from hal.model.config import Config
from hal.model.flops import flops_per_token, visible_pairs
from hal.model.generate import generate
from hal.model.gpt import GPT
from hal.model.tokenizer import NullTokenizer


@pytest.fixture
def model(references):
    made = GPT(Config(num_layers=1, hidden_size=32, seq_length=8, vocab_size=101), torch.device("cpu"))
    made.requires_grad_(False)
    for parameter in made.parameters():
        parameter.mul_(8.0)  # far from uniform
    return made


def test_the_seed_decides(model):
    def text(seed):
        return generate(model, NullTokenizer(100), [1, 2, 3], 20, temperature=1.0, rng=hal.Rng(seed))

    assert text(1) == text(1) != text(2)
    assert 0 < len(text(1)) <= 20  # longer than the context: the model sees the last 8


def test_temperature_zero_takes_the_likeliest_of_the_real_vocabulary(model):
    # Make a padding id (101 ids are padded to 128) the likeliest by far.
    model.embedding.word_embeddings.weight[120] = model.embedding.word_embeddings.weight[:101].sum(0) * 10
    ids = [1, 2, 3]
    for got in generate(model, NullTokenizer(100), [1, 2, 3], 5, temperature=0.0, rng=hal.Rng(0)):
        logits = model(torch.tensor([ids]))[-1, 0]
        assert got == int(logits[:101].argmax()) < 100
        ids.append(got)


def test_sampling_has_the_models_distribution(model):
    probabilities = torch.softmax(model(torch.tensor([[5]]))[-1, 0, :101].float() / 5.0, -1)
    counts = torch.zeros(101)
    for seed in range(1500):
        made = generate(model, NullTokenizer(100), [5], 1, temperature=5.0, rng=hal.Rng(seed))
        counts[made[0] if made else 100] += 1
    # Chi-squared over the ids expected at least 8 times; its mean is the degrees of freedom.
    expected = probabilities * 1500
    often = expected >= 8
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum().item()
    freedom = int(often.sum()) - 1
    assert freedom >= 3 and statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_an_end_of_document_stops(model):
    table = model.embedding.word_embeddings.weight
    table[100] = table.sum(0) * 50
    model.decoder.final_layernorm.weight.zero_()
    model.decoder.final_layernorm.bias.copy_(table[100])
    assert generate(model, NullTokenizer(100), [1], 9, temperature=0.0, rng=hal.Rng(0)) == []


@pytest.mark.parametrize("window", [(None, 0), (3, 0), (0, 0), (5, -2), (None, -4)])
def test_visible_pairs_are_counted(window):
    pre, next_ = window
    seen = [(i, j) for i in range(9) for j in range(9) if (pre is None or j >= i - pre) and j <= i + next_]
    assert visible_pairs(9, pre, next_) == len(seen)


def test_flops_are_three_times_the_forwards_products():
    # Counted by hand: h=8, 2 layers, 2 heads of 4, one key/value head, ffn 16 gated, vocabulary 128, s=4, causal.
    config = Config(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        num_query_groups=1,
        ffn_hidden_size=16,
        swiglu=True,
        seq_length=4,
    )
    per_layer = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16
    attention = 2 * 2 * 8 * (1 + 2 + 3 + 4) / 4  # two products of 2 flops per pair and channel
    assert flops_per_token(config) == 3 * (2 * (2 * per_layer + 8 * 128) + 2 * attention)
