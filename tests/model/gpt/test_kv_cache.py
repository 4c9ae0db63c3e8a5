"""The KV cache does not change results: tokens processed in chunks give the logits of the whole sequence."""

import pytest
import torch
from model_options import CACHED_KINDS, LATENT_OPTIONS, ROPE_OPTIONS, SCALED_OPTIONS, sizes

import hal
from hal.model.config.schema import Config
from hal.model.gpt.kv_cache import KeyValueCache, bucket
from hal.model.gpt.model import GPT
from hal.model.parallel.tensor_sharding import Parallel

SIZES = {**sizes(3, 32, 4, 16), "vocab_size": 101}
KINDS = {
    **CACHED_KINDS,
    "llama-interleaved-no-flash-attn": {**ROPE_OPTIONS, "rotary_interleaved": True, "use_flash_attn": False},
    "window": {**ROPE_OPTIONS, "pre_tokens": 3},
    "latent-no-flash-attn": {**LATENT_OPTIONS, "use_flash_attn": False, "q_lora_rank": None},
    "latent-window": {**LATENT_OPTIONS, "pre_tokens": 3, "shape_order": "BSND"},
    "scaled-no-flash-attn": {**SCALED_OPTIONS, "use_flash_attn": False},
    "sandwich": {**ROPE_OPTIONS, "use_sandwich_norm": True},
}


def cached(model, tokens, pieces):
    config, layers = model.config, range(model.config.num_layers)
    cache = KeyValueCache(config, layers, len(tokens), tokens.shape[1] + 2, Parallel(), torch.device("cpu"))
    return torch.cat([model(part, cache=cache) for part in tokens.split(pieces, 1)])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_of_pieces_are_those_of_the_whole(cpu_ref, kind):
    model = GPT(Config(**SIZES, **KINDS[kind], init_method_std=0.2), torch.device("cpu"))
    tokens = torch.randint(0, 101, (3, 12), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    # Linear attention divides short queries and keys by their lengths, and the rounding of products with them.
    tolerance = 1e-4 if kind == "gated-delta" else 2e-5
    for pieces in ([12], [5, 7], [1] * 12, [7, 1, 1, 3]):
        torch.testing.assert_close(cached(model, tokens, pieces), whole, rtol=tolerance, atol=tolerance)


def test_sequences_cut_over_ranks_are_refused(references):
    with pytest.raises(hal.ContractError, match="--sequence-parallel"):
        KeyValueCache(Config(**SIZES), range(3), 1, 8, Parallel(sequence=True), torch.device("cpu"))


def group(size):
    """A group of the given number of ranks, of which this is the first."""
    comm = hal.SingleRankComm()
    comm.size = size
    return comm


def test_a_tensor_parallel_rank_keeps_its_own_heads_and_positions_go_on(references):
    config = Config(**SIZES, **{**ROPE_OPTIONS, "num_query_groups": 4})
    cache = KeyValueCache(config, [5], 2, 7, Parallel(tp=group(2), cp=group(1)), torch.device("cpu"))
    part = torch.arange(3 * 2 * 2 * 8.0).view(3, 2, 2, 8)  # positions, sequences, 4 groups over 2 ranks, channels
    keys, values = cache.append(5, part, -part)
    assert torch.equal(keys, part) and torch.equal(values, -part)
    with pytest.raises(ValueError, match="zip"):
        cache.append(5, part)
    first = cache.rotary_cos_sin(3)
    cache.advance(3)
    keys, values = cache.append(5, part + 1, part + 2)
    assert torch.equal(keys, torch.cat([part, part + 1])) and torch.equal(values, torch.cat([-part, part + 2]))
    assert cache.length == 3 and cache.capacity == 7 and cache.rotary_cos_sin(4)[0].shape[0] == 4
    whole = KeyValueCache(config, [], 1, 7, Parallel(), torch.device("cpu")).rotary_cos_sin(7)
    for angles, begin, end in ((first, 0, 3), (cache.rotary_cos_sin(2), 3, 5)):
        assert all(torch.equal(a, w[begin:end]) for a, w in zip(angles, whole))


def test_sequences_cut_over_context_ranks_are_refused(references):
    with pytest.raises(hal.ContractError, match="--context-parallel-size 1"):
        KeyValueCache(Config(**SIZES), range(3), 1, 8, Parallel(cp=group(2)), torch.device("cpu"))


def test_a_bucketed_cache_hides_the_rows_that_are_not_filled(references):
    def after_three(bucketed):
        cache = KeyValueCache(Config(**SIZES), [0], 1, 70, Parallel(), torch.device("cpu"), bucketed=bucketed)
        assert cache.hidden(3, (None, 0)) is None, "the tokens of a first pass are all keys there are"
        cache.advance(3)
        return cache

    cache = after_three(True)
    for window, seen in (
        ((1, 0), [[2, 3], [3, 4]]),
        ((2, -1), [[1, 2], [2, 3]]),
        ((None, 0), [[0, 1, 2, 3], [0, 1, 2, 3, 4]]),
    ):
        hidden = cache.hidden(2, window)[0, 0]
        assert hidden.shape[1] > 5 and [(~row).nonzero().flatten().tolist() for row in hidden] == seen
    shared = cache.hidden(2, (1, 0))
    assert cache.hidden(2, (2, 0)) is not shared is cache.hidden(2, (1, 0)), "a step has one mask per window"
    assert after_three(False).hidden(2, (1, 0)) is None


def test_a_bucketed_cache_is_read_up_to_a_power_of_two(references):
    config = Config(**{**SIZES, "seq_length": 200})
    cache = KeyValueCache(config, [0], 1, 70, Parallel(), torch.device("cpu"), bucketed=True)
    part = torch.ones(3, 1, 4, 8)
    assert cache.capacity == 128 and len(cache.append(0, part, part)[0]) == 3, "all keys of a first pass are its own"
    for length, rows in ((3, 64), (61, 64), (62, 128)):
        cache.length = length
        assert len(cache.append(0, part, part)[0]) == rows == cache.hidden(3, (None, 0)).shape[-1]


def test_a_cache_says_how_many_tokens_it_can_still_store(references):
    cache = KeyValueCache(Config(**SIZES), [], 1, 8, Parallel(), torch.device("cpu"))
    cache.advance(5)
    assert cache.free == 3
    cache.discard(2)
    assert (cache.length, cache.free) == (3, 5)


@pytest.mark.parametrize(
    "count, least, limit, rounded",
    [(1, 1, 99, 1), (2, 1, 99, 2), (3, 1, 99, 4), (64, 1, 99, 64), (65, 1, 99, 99), (5, 64, 200, 64), (7, 1, 3, 7)],
)
def test_a_bucket_is_a_power_of_two_within_its_limit(count, least, limit, rounded):
    assert bucket(count, least, limit) == rounded
