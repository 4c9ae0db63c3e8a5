"""Latent attention: what generation remembers, YaRN's angles and factors, and the products that are counted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from model_options import LATENT_OPTIONS, sizes
from torch import Tensor

import hal
from hal.model.config.flops import attention_weights, flops_per_token, visible_pairs
from hal.model.config.rotary import rotation, yarn_factor
from hal.model.config.schema import Config
from hal.model.gpt.kv_cache import KeyValueCache
from hal.model.gpt.model import GPT
from hal.model.parallel.tensor_sharding import Parallel
from hal.testing.spy import Spy

SIZES = {**sizes(2, 32, 4, 16), "vocab_size": 101, "init_method_std": 0.2, **LATENT_OPTIONS}
CPU = torch.device("cpu")


def group(size: int) -> hal.SingleRankComm:
    """A group of the given number of ranks, of which this is the first."""
    comm = hal.SingleRankComm()
    comm.size = size
    return comm


@pytest.mark.parametrize("tp", [1, 2])
def test_a_token_takes_one_latent_and_one_rotated_key_per_layer(tp: int, references: Any) -> None:
    """As many elements on each tensor-parallel rank; keys and values would be 4 heads of 12 and of 6 channels."""
    cache = KeyValueCache(Config(**SIZES), range(2), 3, 10, Parallel(tp=group(tp)), CPU)
    elements = sum(t.numel() for tensors in cache.tensors.values() for t in tensors)
    assert elements == 2 * 3 * 10 * (16 + 4)


@torch.no_grad()
def test_the_next_token_is_not_expanded_into_keys_and_values(cpu_ref: Any) -> None:
    """Generation multiplies the queries instead: no product has a row per stored token."""
    config = Config(**SIZES)
    model, tokens = GPT(config, CPU), torch.arange(12)[None]
    cache = KeyValueCache(config, range(2), 1, 12, Parallel(), CPU)
    model(tokens[:, :11], cache=cache)
    rows: list[int] = []

    class Rows(Spy):
        def _recorded(self, impl: Any) -> Any:
            def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                rows.append(x.shape[0])
                return impl.call(x, *args, **kwargs)

            return dataclasses.replace(impl, call=call) if impl.op.name == "linear" else impl

    with hal.activated(Rows(cpu_ref)):
        model(tokens[:, 11:], cache=cache)
    assert rows and set(rows) == {1}


@pytest.mark.parametrize("bucketed", [False, True])
def test_heads_of_the_values_may_be_larger_than_those_of_the_keys(cpu_ref: Any, bucketed: bool) -> None:
    config = Config(**{**SIZES, "v_head_dim": 20})
    model, tokens = GPT(config, CPU), torch.arange(12)[None]
    cache = KeyValueCache(config, range(2), 1, 12, Parallel(), CPU, bucketed=bucketed)
    with torch.no_grad():
        pieces = torch.cat([model(part, cache=cache) for part in tokens.split([7, 1, 4], 1)])
        torch.testing.assert_close(pieces, model(tokens), rtol=2e-5, atol=2e-5)


def test_without_a_factor_yarn_is_plain() -> None:
    plain = Config(**{**SIZES, "rope_type": "rope"})
    for ours, right in zip(
        rotation(Config(**{**SIZES, "rotary_scaling_factor": 1.0}), 16, CPU), rotation(plain, 16, CPU)
    ):
        assert torch.equal(ours, right)
    assert yarn_factor(plain, 5.0) == 1.0


def test_yarn_keeps_fast_channels_and_slows_slow_ones() -> None:
    """64 rotated channels of base 10000 within 4096 tokens: DeepSeek-V3's values."""
    options = {"qk_pos_emb_head_dim": 64, "rotary_scaling_factor": 40.0, "original_max_position_embeddings": 4096}
    config = Config(**{**SIZES, **options, "mscale_all_dim": 1.0})
    cos, sin = rotation(config, 2, CPU)
    angle = torch.atan2(sin[1], cos[1]).double()
    plain = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    # Channel 10 turns 4096 * 10000^(-20/64) / 2 pi = 36.7 times, and channel 23 turns 0.87 times.
    torch.testing.assert_close(angle[:11], plain[:11], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(angle[23:], plain[23:] / 40, rtol=1e-4, atol=0.0)
    assert all(plain[11:23] / 40 < angle[11:23]) and all(angle[11:23] < plain[11:23])
    assert torch.hypot(cos, sin) == pytest.approx(1.0)  # mscale equals mscale_all_dim
    assert yarn_factor(config, 1.0) == pytest.approx(0.1 * math.log(40) + 1)


@pytest.mark.parametrize("q_lora_rank", [None, 12])
@pytest.mark.parametrize("tp", [1, 2])
def test_counted_products_are_those_of_the_model(q_lora_rank: int | None, tp: int, references: Any) -> None:
    config = Config(**{**SIZES, "q_lora_rank": q_lora_rank, "disable_bias_linear": True})
    model = GPT(config, torch.device("meta"), Parallel(tp=group(tp)))
    matrices = [p for n, p in model.named_parameters() if "self_attention" in n and p.ndim == 2]
    assert sum(p.numel() for p in matrices) == 2 * attention_weights(config, tp)
    pairs = visible_pairs(16, None, 0) / 16
    rest = 2 * 2 * 32 * config.ffn_hidden_size + 32 * config.padded_vocab_size
    total = 6 * (2 * attention_weights(config) + rest + 2 * 4 * (12 + 6) * pairs)
    assert flops_per_token(config) == pytest.approx(total)
