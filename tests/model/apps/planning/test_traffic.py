"""The bytes a rank sends in a step, against the formulas of the papers, written out for one model.

The model: 6 layers, hidden size h = 64, 8 heads of 8 channels (2 key/value heads), s = 32 positions, microbatches of
b = 3 samples, a vocabulary of 256. Ring algorithms send (n-1)/n of a tensor to gather or to reduce-scatter it over n
ranks, and twice that to all-reduce it.
"""

from __future__ import annotations

from typing import Any

import pytest
from model_options import LLAMA_OPTIONS, sizes

from hal.bench.suites.scaling import LATENT
from hal.model.apps.planning.shape import Shape
from hal.model.apps.planning.traffic import Traffic, traffic
from hal.model.config.parallel_layout import make_parallel_layout
from hal.model.config.schema import Config

LAYERS, H, S, B, VOCABULARY, KV_CHANNELS, FFN = 6, 64, 32, 3, 256, 16, 96
HIDDEN = S * B * H * 4
"""Bytes of the float32 hidden state of a microbatch."""
LAYER = H * (H + 2 * KV_CHANNELS) + H * H + 3 * H * FFN + 2 * H
"""Parameters of a LLaMA layer: Q, K and V; the projection; gate, up and down; two norms."""
TABLE = VOCABULARY * H
WHOLE = LAYERS * LAYER + 2 * TABLE + H
TP4 = {"tensor_model_parallel_size": 4, "num_query_groups": 8}
TP2 = {"tensor_model_parallel_size": 2}
PP2, PP3 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 3}
CP4 = {"context_parallel_size": 4}
ULYSSES = {"context_parallel_size": 2, "context_parallel_algo": "ulysses"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
TIED = {"untie_embeddings_and_output_weights": False}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2}
ZBV, INTERLEAVED = {"pipeline_schedule": "zbv"}, {"num_layers_per_virtual_pipeline_stage": 1}


def sent(microbatches: int, dp: int = 1, **options: Any) -> Traffic:
    config = Config(
        **sizes(LAYERS, H, 8, S),
        ffn_hidden_size=FFN,
        micro_batch_size=B,
        global_batch_size=B * dp * microbatches,
        **{**LLAMA_OPTIONS, "num_query_groups": 2, **options},
    )
    config.set_vocabulary(VOCABULARY)
    ranks = config.tensor_model_parallel_size * config.context_parallel_size * config.pipeline_model_parallel_size
    return traffic(Shape.of(config, make_parallel_layout(config, ranks * dp)))


@pytest.mark.parametrize(
    "options, microbatches, all_reduces, gathers",
    [
        # Narayanan et al., section 3.2: two all-reduces per layer forward, two backward; and one at each end.
        (TP4, 1, LAYERS * 4 + 2, 0),
        (TP4, 5, 5 * (LAYERS * 4 + 2), 0),
        ({**TP4, **FULL}, 2, 2 * (LAYERS * 6 + 2), 0),
        ({**TP4, "recompute_granularity": "selective"}, 2, 2 * (LAYERS * 4 + 2), 0),
        # Korthikanti et al., section 4.2.2: sequence parallelism sends the same, and gathers two inputs again.
        ({**TP4, "sequence_parallel": True}, 3, 3 * (LAYERS * 4 + 2), 3 * LAYERS * 2),
        # The busiest rank of a pipeline has the most layers.
        ({**TP4, **PP2, "num_layer_list": ("2", "4")}, 2, 2 * (4 * 4 + 2), 0),
        ({**TP4, **PP2, "num_layer_list": ("5", "1"), "sequence_parallel": True}, 2, 2 * (5 * 4 + 2), 2 * 5 * 2),
        ({**TP4, **PP2, **INTERLEAVED}, 2, 2 * (3 * 4 + 2), 0),
        # Tokens reach experts through the dispatcher; a dense MLP and a shared expert are cut like attention.
        ({**TP4, **EXPERTS}, 1, LAYERS * 2 + 2, 0),
        ({**TP4, **EXPERTS, "moe_shared_expert_intermediate_size": 16}, 1, LAYERS * 4 + 2, 0),
        ({**TP4, **EXPERTS, "moe_layer_freq": "[1,0,1,0,0,0]"}, 1, 2 * 2 + 4 * 4 + 2, 0),
    ],
)
def test_tensor_parallelism(options: dict[str, Any], microbatches: int, all_reduces: int, gathers: int) -> None:
    expected = all_reduces * 2 * 3 / 4 * HIDDEN + gathers * 3 / 4 * HIDDEN
    assert sent(microbatches, **options).tensor == pytest.approx(expected)
    halved = sent(microbatches, **options, bf16=True)
    assert halved.tensor == pytest.approx(expected / 2)


def test_latents_enter_a_tensor_parallel_region_instead_of_hidden_states() -> None:
    # Ring all-reduces over two ranks send as much as they reduce: in the forward pass the results of attention and MLP,
    # in the backward pass the gradients of latents (24 + 16), of the keys' rotated channels (8) and of the MLP's input.
    row = S * B * 4
    layer, ends = row * (H + H + (24 + 16 + 8) + H), row * 2 * H
    assert sent(8, **TP2, **LATENT).tensor == 8 * (LAYERS * layer + ends)
    assert sent(8, **TP2, **LATENT, **FULL).tensor == 8 * (LAYERS * (layer + row * 2 * H) + ends)
    # A gather and a scatter are half an all-reduce each. Gradients of down projections are summed once per step.
    half_pass = row * (48 + H + 2 * H) / 2
    again, down = row * (24 + 16 + H) / 2, 4 * H * 48
    sequence = {**TP2, **LATENT, "sequence_parallel": True}
    assert sent(8, **sequence).tensor == 8 * (LAYERS * (2 * half_pass + again) + ends) + LAYERS * down
    assert sent(8, **sequence, **FULL).tensor == 8 * (LAYERS * (3 * half_pass + again) + ends) + LAYERS * down


@pytest.mark.parametrize("width, options", [(4, {}), (2, {"bf16": True})])
def test_context_parallelism(width: int, options: dict[str, Any]) -> None:
    # A ring of 4: keys and values of 8 positions go to each of the 3 others, in the backward pass too, where their
    # float32 gradients travel around the whole ring, back to their owner.
    keys_and_values = S / 4 * B * 2 * KV_CHANNELS
    forward, backward = 3 * keys_and_values * width, 3 * keys_and_values * width + 4 * keys_and_values * 4
    assert sent(2, **CP4, **options).context == pytest.approx(2 * LAYERS * (forward + backward))
    assert sent(2, **CP4, **FULL, **options).context == pytest.approx(2 * LAYERS * (2 * forward + backward))
    # Ulysses over 2: half of queries, keys, values and outputs is exchanged, and half of their gradients.
    per_pass = 1 / 2 * (S / 2) * B * (2 * H + 2 * KV_CHANNELS) * width
    assert sent(3, **ULYSSES, **options).context == pytest.approx(3 * LAYERS * 2 * per_pass)


@pytest.mark.parametrize(
    "options, hops, width",
    [
        ({**PP2}, 1, HIDDEN),
        ({**PP3}, 1, HIDDEN),
        ({**PP3, **TP4, "sequence_parallel": True}, 1, HIDDEN / 4),
        ({**PP2, **INTERLEAVED}, 3, HIDDEN),  # stages 0, 2 and 4 of 6 are on rank 0, and each has a next one elsewhere
        ({**PP3, **INTERLEAVED}, 2, HIDDEN),
        ({**PP3, **ZBV}, 2, HIDDEN),  # down through the ranks and up again; the turning point is within one rank
        ({**PP3, **ZBV, "bf16": True}, 2, HIDDEN / 2),
    ],
)
def test_pipelines(options: dict[str, Any], hops: int, width: float) -> None:
    assert sent(6, **options).pipeline == 6 * hops * 2 * width, "a hidden state forward, and its gradient back"


def test_replicated_gradients_are_all_reduced_in_float32() -> None:
    for options in ({}, {"bf16": True}):
        assert sent(5, dp=4, **options).data == pytest.approx(2 * 3 / 4 * 4 * WHOLE)
    # Context-parallel ranks have the same weights; the other tensor-parallel rank has half of the columns and rows.
    assert sent(1, dp=2, **CP4).data == pytest.approx(2 * 7 / 8 * 4 * WHOLE)
    norms = (2 * LAYERS + 1) * H
    assert sent(1, dp=2, tensor_model_parallel_size=2).data == pytest.approx(
        2 * 1 / 2 * 4 * ((WHOLE - norms) / 2 + norms)
    )


def test_gradients_of_experts_are_summed_over_their_own_replicas() -> None:
    # A router and eight experts are in place of each MLP. A rank has half of the experts, which two of four ranks have.
    others = WHOLE - LAYERS * (3 * H * FFN - 8 * H)
    experts = LAYERS * 4 * 3 * H * FFN
    sums = sent(5, dp=4, **EXPERTS, expert_model_parallel_size=2).data
    assert sums == pytest.approx(2 * 4 * (3 / 4 * others + 1 / 2 * experts))


@pytest.mark.parametrize("width, options", [(4, {}), (2, {"bf16": True})])
def test_sharded_states(width: int, options: dict[str, Any]) -> None:
    # Rajbhandari et al., section 7: gradients are reduce-scattered (each microbatch's, if they are sharded), weights
    # gathered: once per step, or with sharded weights for every forward and every backward pass.
    share = 3 / 4 * WHOLE
    assert sent(5, dp=4, zero_stage=1, **options).data == pytest.approx(share * (4 + width))
    assert sent(5, dp=4, use_distributed_optimizer=True, **options).data == pytest.approx(share * (4 + width))
    assert sent(5, dp=4, zero_stage=2, **options).data == pytest.approx(share * (5 * 4 + width))
    assert sent(5, dp=4, zero_stage=3, **options).data == pytest.approx(share * (5 * 4 + 2 * 5 * width))


@pytest.mark.parametrize("counts", [("4", "2"), ("2", "4")])
def test_a_pipelines_larger_end_sends_most(counts: tuple[str, str]) -> None:
    last_is_larger = counts == ("2", "4")
    parameters = 4 * LAYER + TABLE + (H if last_is_larger else 0)
    layout = {**PP2, "num_layer_list": counts}
    assert sent(6, dp=2, **layout).data == pytest.approx(2 * 1 / 2 * 4 * parameters)
    # A pipeline's gradients are reduced once, after the last microbatch.
    assert sent(6, dp=2, **layout, zero_stage=2).data == pytest.approx(1 / 2 * parameters * (4 + 4))


def test_tied_weights_at_both_ends_are_summed() -> None:
    # An all-reduce over two ranks sends the gradient once.
    assert sent(6, **PP2, **TIED).tied == 4 * TABLE
    assert sent(6, **PP2, **TIED, **TP4, bf16=True).tied == 4 * TABLE / 4
    assert sent(6, **PP2).tied == 0
    assert sent(6, **TIED).tied == 0
    assert sent(6, **PP3, **TIED, **ZBV).tied == 0, "rank 0 has both ends"


def test_experts_on_two_ranks_exchange_half_of_the_rows() -> None:
    options = {**EXPERTS, "expert_model_parallel_size": 2}
    rows = S * B * 2 / 2  # two experts for each token, half of them on the other rank
    # A row and its result are sent forward, their gradients back; with each row goes its probability, or the gradient
    # of that. The ranks also tell each other, in int64, how many rows each of the eight experts gets from them.
    backward = rows * (2 * 4 * H + 4)
    forward = backward + 8 * 8
    assert sent(3, dp=2, **options).experts == 3 * LAYERS * (forward + backward)
    assert sent(3, dp=2, **options, **FULL).experts == 3 * LAYERS * (2 * forward + backward)
    assert sent(3, dp=2, **options, moe_layer_freq="[1,0,1,0,0,0]").experts == 3 * 2 * (forward + backward)
    assert sent(3, dp=2, **EXPERTS).experts == 0


def test_one_rank_sends_nothing_and_the_total_is_the_sum() -> None:
    assert sent(4) == Traffic(0, 0, 0, 0, 0)
    assert Traffic(1, 2, 4, 8, 16).total == 31
