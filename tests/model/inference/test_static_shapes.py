"""On a device that compiles every shape, generation and scoring use few shapes and give the same text and scores."""

import dataclasses

import pytest
import torch
from model_options import CACHED_KINDS, ROPE_OPTIONS, sizes

import hal
from hal.model.apps.evaluation.scoring import Example, score
from hal.model.config.schema import Config
from hal.model.gpt.kv_cache import KeyValueCache, bucket
from hal.model.gpt.model import GPT
from hal.model.inference.decoding import complete
from hal.model.inference.engine import Engine
from hal.model.inference.sampling import Sampling
from hal.model.parallel.tensor_sharding import Parallel
from hal.testing.spy import Spy

SIZES = {**sizes(2, 32, 4, 200), "vocab_size": 101}
KINDS = {
    **CACHED_KINDS,
    "window": {**ROPE_OPTIONS, "pre_tokens": 9},
    "window-no-flash-attn": {**ROPE_OPTIONS, "pre_tokens": 9, "use_flash_attn": False},
}


class Static(Spy):
    """A backend that compiles every shape; records the shapes and plain values of all calls of each op."""

    def __init__(self, inner):
        self.shapes = {}
        super().__init__(inner)

    def capabilities(self):
        return dataclasses.replace(self.inner.capabilities(), static_shapes=True)

    def _recorded(self, impl):
        call = impl.call

        def recorded(*args, **kwargs):
            arguments = (*args, *kwargs.values())
            key = tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else str(type(a)) for a in arguments)
            self.shapes.setdefault(impl.op.name, set()).add(key)
            return call(*args, **kwargs)

        return dataclasses.replace(impl, call=recorded)


@pytest.fixture
def static(cpu_ref):
    return Static(cpu_ref)


def an_engine(**options):
    torch.manual_seed(0)
    return Engine(GPT(Config(**SIZES, init_method_std=0.3, **options), torch.device("cpu")).requires_grad_(False), 101)


def text(engine, prompts, count, cached=True):
    rngs = [hal.Rng(3).fork("prompt", n) for n in range(len(prompts))]
    continuations = complete(engine, prompts, count, Sampling(0.7), rngs, cached=cached)
    return [c.ids for c in continuations], [t.logprob for c in continuations for t in c.tokens]


def assert_same(actual, expected):
    assert actual[0] == expected[0]
    assert actual[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_same_with_few_shapes(static, kind, cached):
    prompts, count = ([[5, 6, 7, 8, 9, 10, 11], [1, 2, 3]], 90) if cached else ([[1, 2, 3]], 20)
    expected = text(an_engine(**KINDS[kind]), prompts, count, cached)
    with hal.activated(static):
        assert_same(text(an_engine(**KINDS[kind]), prompts, count, cached), expected)
    # The prompt, and one token with 64 and with 128 keys; or whole texts of 4, 8, 16 and 32 tokens.
    few = 3 if cached else 4
    attention = static.shapes.pop(
        "flash_attention" if KINDS[kind].get("use_flash_attn", True) else "scale_mask_softmax"
    )
    # Layers with and without a window differ, but for a single token, whose window is a mask.
    twice = (1 if cached else few) if kind == "scaled" else 0
    assert len(attention) == few + twice
    weights = static.shapes.pop("linear")
    # Layers and norms with different weights, and the logits of one token. Latents add three layers and two norms, and
    # linear attention two layers and a norm.
    layers, norms = (7, 3) if "latent" in kind else (6, 2) if kind == "gated-delta" else (4, 1)
    assert len(weights) <= layers * few + 1
    for norm in ("layer_norm", "rms_norm"):
        assert len(static.shapes.pop(norm, ())) <= norms * few
    assert len(static.shapes.pop("rotary", ())) <= 2 * few  # queries and keys
    # The output of linear attention has no bias.
    assert len(static.shapes.pop("bias_dropout_add")) <= (2 if kind == "gated-delta" else 1) * few
    assert all(len(shapes) <= few for shapes in static.shapes.values())


def test_a_text_longer_than_the_context_goes_on(static):
    prompt = [n % 100 for n in range(190)]
    expected = text(an_engine(**ROPE_OPTIONS), [prompt], 30)
    with hal.activated(static):
        assert_same(text(an_engine(**ROPE_OPTIONS), [prompt], 30), expected)
    # The prompt [200], the shortened context [128], and one token with 200 and with 128 keys.
    assert len(static.shapes["flash_attention"]) == 4


def test_scores_are_the_same_with_few_shapes(static):
    examples = [Example(tuple(n * s % 101 for n in range(s)), 2) for s in range(2, 40)]
    expected = score(an_engine(), examples, batch=1)
    with hal.activated(static):
        torch.testing.assert_close(score(an_engine(), examples, batch=1), expected, rtol=1e-5, atol=1e-5)
    assert len(static.shapes["cross_entropy"]) == 7  # 1, 2, 4, 8, 16, 32 and 64 tokens


@torch.no_grad()
def test_a_chunk_in_the_middle_sees_what_it_would_without_buckets(cpu_ref):
    config = Config(**SIZES, **ROPE_OPTIONS, pre_tokens=9, init_method_std=0.2)
    model, tokens = GPT(config, torch.device("cpu")), torch.arange(100)[None] % 101
    cache = KeyValueCache(config, range(2), 1, 100, Parallel(), torch.device("cpu"), bucketed=True)
    pieces = [model(part, cache=cache) for part in tokens.split([20, 50, 30], 1)]
    torch.testing.assert_close(torch.cat(pieces), model(tokens), rtol=2e-5, atol=2e-5)


def test_buckets_are_powers_of_two_up_to_the_limit():
    assert [bucket(n, 1, 100) for n in (1, 2, 3, 5, 64, 65, 100, 130)] == [1, 2, 4, 8, 64, 100, 100, 130]
    assert [bucket(n, 64, 1000) for n in (1, 64, 65, 600)] == [64, 64, 128, 1000]
