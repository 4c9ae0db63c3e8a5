"""Generated text: a function of the seed, greedy at temperature 0, never an id outside the tokenizer; equal
with and without the cache, alone and in a batch."""

from dataclasses import replace

import pytest
import torch
from model_options import ROPE_OPTIONS, sizes

import hal
from hal.model.config.flops import flops_per_token, visible_pairs
from hal.model.config.schema import Config, ConfigError
from hal.model.data.tokenizers.tokenizer import NullTokenizer
from hal.model.gpt.model import GPT
from hal.model.inference.decoding import complete, context_start, generate, stream
from hal.model.inference.engine import Engine, NotFinite
from hal.model.inference.sampling import Sampling


@pytest.fixture
def model(references):
    gpt = GPT(Config(num_layers=1, hidden_size=32, seq_length=8, vocab_size=101), torch.device("cpu"))
    gpt.requires_grad_(False)
    for parameter in gpt.parameters():
        parameter.mul_(8.0)  # far from uniform
    return gpt


def test_the_seed_decides(model):
    def text(seed):
        return generate(model, NullTokenizer(100), [1, 2, 3], 20, temperature=1.0, rng=hal.Rng(seed))

    assert text(1) == text(1) != text(2)
    assert 0 < len(text(1)) <= 20  # longer than the context: the model sees the last 8


def test_temperature_zero_takes_the_likeliest_of_the_real_vocabulary(model):
    # Make a padding id (101 ids are padded to 128) by far the most likely.
    model.embedding.word_embeddings.weight[120] = model.embedding.word_embeddings.weight[:101].sum(0) * 10
    ids = [1, 2, 3]
    for got in generate(model, NullTokenizer(100), [1, 2, 3], 5, temperature=0.0, rng=hal.Rng(0)):
        logits = model(torch.tensor([ids]))[-1, 0]
        assert got == int(logits[:101].argmax()) < 100
        ids.append(got)
    assert len(ids) == 3 + 5


def test_sampling_has_the_models_distribution(model, cpu_ref):
    probabilities = torch.softmax(model(torch.tensor([[5]]))[-1, 0, :101].float() / 5.0, -1)
    texts = complete(Engine(model, 101), [[5]] * 1500, 1, Sampling(5.0), [hal.Rng(seed) for seed in range(1500)])
    counts = torch.tensor([text.ids[0] for text in texts]).bincount(minlength=101)
    # Chi-squared over the ids expected at least 8 times; its mean is the number of degrees of freedom.
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


SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 12, "vocab_size": 101}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 2, 1]]


def an_engine(**options):
    return Engine(GPT(Config(**SMALL, init_method_std=0.3, **options), torch.device("cpu")).requires_grad_(False), 101)


def continued(engine, prompts, count, sampling, *, cached=True, seed=3, **how):
    rngs = [hal.Rng(seed).fork("prompt", n) for n in range(len(prompts))]
    return complete(engine, prompts, count, sampling, rngs, ends=[100], cached=cached, **how)


# With a context of 12, the angles of all tokens change behind the sixth.
LONGROPE = {
    **ROPE_OPTIONS,
    "rope_type": "longrope",
    "original_max_position_embeddings": 6,
    "rotary_scaling_factor": 2.0,
    "short_factor": ("1.0", "1.1", "1.2", "1.3"),
    "long_factor": ("2.0", "4.0", "6.0", "8.0"),
}


@pytest.mark.parametrize(
    "options",
    [{}, ROPE_OPTIONS, {"pre_tokens": 3, "use_flash_attn": False}, LONGROPE],
    ids=["gpt2", "llama", "window", "longrope"],
)
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.3, top_k=30, top_p=0.95)], ids=["greedy", "drawn"])
def test_the_cache_changes_neither_tokens_nor_logits(cpu_ref, options, sampling):
    engine = an_engine(**options)
    # 30 tokens exceed the context of 12 several times.
    with_cache, without = (continued(engine, PROMPTS, 30, sampling, cached=c) for c in (True, False))
    assert [c.ids for c in with_cache] == [c.ids for c in without]
    assert max(len(c.ids) for c in with_cache) == 30
    for one, other in zip(with_cache, without):
        assert [t.logprob for t in one.tokens] == pytest.approx([t.logprob for t in other.tokens], abs=2e-5)


@pytest.mark.parametrize("options", [{}, ROPE_OPTIONS], ids=["gpt2", "llama"])
def test_a_prompts_text_does_not_depend_on_the_rest_of_the_batch(cpu_ref, options):
    engine, sampling = an_engine(**options), Sampling(1.2)
    together = continued(engine, PROMPTS, 20, sampling)
    for n, prompt in enumerate(PROMPTS):
        rng = hal.Rng(3).fork("prompt", n)
        (single,) = complete(engine, [prompt], 20, sampling, [rng], ends=[100])
        assert single.ids == together[n].ids and single.reason == together[n].reason


def test_a_rows_stream_is_forked_by_the_number_of_its_tokens(cpu_ref, monkeypatch):
    engine, forks, fork = an_engine(), [], hal.Rng.fork

    def recorded(rng, *names):
        forks.append((rng.seed, *names))
        return fork(rng, *names)

    monkeypatch.setattr(hal.Rng, "fork", recorded)
    complete(engine, [[1, 2, 3], [4]], 2, Sampling(1.0), [hal.Rng(7), hal.Rng(8)])
    assert sorted(forks) == [(7, 0), (7, 1), (8, 0), (8, 1)]


def test_a_long_prompt_is_read_on_when_a_short_one_has_ended(references):
    engine, prompts = an_engine(), [[4], [5, 6, 7, 8, 9]]
    together = continued(engine, prompts, 1, Sampling(0.0))
    assert [c.ids for c in together] == [continued(engine, [p], 1, Sampling(0.0))[0].ids for p in prompts]


def test_a_cache_has_room_for_the_text_and_not_for_more(references, monkeypatch):
    engine, capacities, new_cache = an_engine(), [], Engine.new_cache

    def recorded(self, batch, capacity):
        capacities.append(capacity)
        return new_cache(self, batch, capacity)

    monkeypatch.setattr(Engine, "new_cache", recorded)
    for count in (5, 9):
        assert not any(token.top for token in stream(engine, [[1, 2, 3]], count, Sampling(0.0), [hal.Rng(0)]))
    complete(engine, [[1, 2, 3]], 14, Sampling(0.0), [hal.Rng(0)])
    # The context of 12 begins at 0, and from 13 tokens on at 6.
    assert capacities == [8, 12, 12, 11]
    capacities.clear()
    list(stream(an_engine(**LONGROPE), [[1, 2, 3, 4, 5, 6]], 2, Sampling(0.0), [hal.Rng(0)]))
    assert capacities == [6, 8], "the angles of longer texts are others"


def test_what_is_seen_of_a_long_text():
    lengths = [(n - context_start(n, 8)) for n in range(1, 40)]
    assert lengths[:8] == list(range(1, 9)) and set(lengths[8:]) == {5, 6, 7, 8}
    assert all(context_start(n, 1) == n - 1 for n in range(1, 5))
    assert context_start(100, 101) == 0


def test_a_text_ends_where_it_is_told_to(references):
    engine = an_engine()
    free = continued(engine, [[1, 2]], 10, Sampling(0.0))[0]
    assert free.reason == "length" and len(free.ids) == 10
    third = free.ids[2]
    completion = continued(engine, [[1, 2]], 10, Sampling(0.0), finished=lambda row, ids: ids[-1] == third)[0]
    assert completion.reason == "stop" and completion.ids == free.ids[: free.ids.index(third) + 1]
    assert continued(engine, [[1]], 0, Sampling(0.0))[0].ids == []


def test_logprobs_are_those_of_the_model_whatever_the_sampling(references):
    engine = an_engine()
    tokens = list(stream(engine, [[1, 2]], 4, Sampling(0.5, top_k=3), [hal.Rng(0)], logprobs=2))
    ids = [1, 2]
    for token in tokens:
        log_probs = torch.log_softmax(engine.model(torch.tensor([ids]))[-1, 0, :101].float(), -1)
        assert token.logprob == pytest.approx(float(log_probs[token.id]), abs=1e-5)
        values, best = log_probs.topk(2)
        assert [i for i, _ in token.top] == best.tolist()
        assert [p for _, p in token.top] == pytest.approx(values.tolist(), abs=1e-5)
        ids.append(token.id)
    assert len(ids) == 2 + 4


def test_prompts_that_cannot_be_continued_are_refused(references):
    engine = an_engine()
    for prompts, text in (([[]], "prompt 0 is empty"), ([[1], [101]], "prompt 1 has the id 101"), ([[-1]], "id -1")):
        with pytest.raises(ConfigError, match=text):
            continued(engine, prompts, 3, Sampling())
    (completion,) = continued(engine, [[0, 100]], 1, Sampling())  # the first and the last valid id
    assert len(completion.tokens) == 1 or completion.reason == "stop"
    assert continued(engine, [[1]], 0, Sampling())[0].tokens == []


@pytest.mark.parametrize("window", [(None, 0), (3, 0), (0, 0), (5, -2), (None, -4)])
def test_visible_pairs_are_counted(window):
    pre, next_ = window
    pairs = [(i, j) for i in range(9) for j in range(9) if (pre is None or j >= i - pre) and j <= i + next_]
    assert visible_pairs(9, pre, next_) == len(pairs)


def test_flops_are_three_times_the_forwards_products():
    # Counted by hand: h=8, 2 layers, 2 heads of 4, one key/value head, ffn 16 gated, vocabulary 128, s=4, causal.
    config = Config(**sizes(2, 8, 2, 4), num_query_groups=1, ffn_hidden_size=16, swiglu=True)
    per_layer = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16
    attention = 2 * 2 * 8 * (1 + 2 + 3 + 4) / 4  # two products of 2 flops per pair and channel
    assert flops_per_token(config) == 3 * (2 * (2 * per_layer + 8 * 128) + 2 * attention)
    padded = replace(config, num_layers=4, noop_layers=("0", "3"))
    padded.set_vocabulary(128)
    assert flops_per_token(padded) == flops_per_token(config), "no-op layers must add no FLOPs"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(model, value, temperature):
    model.decoder.final_layernorm.weight[3] = value
    with pytest.raises(NotFinite, match="the logits are not finite: the weights hold NaN"):
        generate(model, NullTokenizer(100), [1, 2, 3], 5, temperature=temperature, rng=hal.Rng(0))
