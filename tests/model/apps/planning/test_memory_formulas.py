"""The planner's bytes, term by term, against the formulas they come from, written out for small models.

test_planned_bytes.py compares the same numbers with the memory of a trainer on one or two ranks; the terms here belong
to layouts and points of a step that such a run does not cover.
"""

from __future__ import annotations

from typing import Any

import pytest

from hal.bench.suites.scaling import LATENT
from hal.model.apps.planning.activations import head_bytes, layer_bytes, stage_bytes
from hal.model.apps.planning.memory import Memory, explain, gib, memory, rank_memory, states
from hal.model.apps.planning.shape import Shape
from hal.model.config.parallel_layout import make_parallel_layout
from hal.model.config.schema import Config

LAYERS, H, S, B, VOCABULARY, FFN = 8, 64, 32, 3, 256, 160
TOKENS = S * B
HIDDEN = TOKENS * H * 4
LAYER = 4 * H * H + 3 * H * FFN + 2 * H
"""Parameters of a LLaMA layer: attention's four square matrices; gate, up and down; two norms."""
TABLE = VOCABULARY * H
WHOLE = LAYERS * LAYER + 2 * TABLE + H
TP2, SP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}
PP2, PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
ZBV, INTERLEAVED = {"pipeline_schedule": "zbv"}, {"num_layers_per_virtual_pipeline_stage": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
EXPERT = 3 * H * 32
SPARSE_LAYER = LAYER - 3 * H * FFN + 8 * EXPERT + 8 * H
"""Parameters of a layer with EXPERTS and their router in place of the MLP."""
BF16, FP16, TIED = {"bf16": True}, {"fp16": True}, {"untie_embeddings_and_output_weights": False}


def shape_of(microbatches: int, dp: int = 1, vocabulary: int = VOCABULARY, **options: Any) -> Shape:
    base = {
        "num_layers": LAYERS,
        "hidden_size": H,
        "ffn_hidden_size": FFN,
        "num_attention_heads": 8,
        "seq_length": S,
        "micro_batch_size": B,
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    }
    config = Config(**{**base, **options})
    config.global_batch_size = config.micro_batch_size * dp * microbatches
    config.set_vocabulary(vocabulary)
    ranks = config.tensor_model_parallel_size * config.context_parallel_size * config.pipeline_model_parallel_size
    return Shape.of(config, make_parallel_layout(config, ranks * dp))


@pytest.mark.parametrize(
    "microbatches, dp, options, weights, gradients, optimizer",
    [
        (2, 1, {}, 4, 4, 8),
        (2, 1, BF16, 2, 4, 12),
        (1, 1, BF16, 2, 2, 12),  # one microbatch in one process needs no float32 sum
        (1, 1, FP16, 2, 4, 12),  # fp16 gradients are unscaled in float32
        (1, 2, BF16, 2, 4, 12),  # among replicas, gradients are summed in float32
        (2, 4, {**BF16, "zero_stage": 1}, 4 / 4, 4 / 4, 8 / 4),
        (2, 2, {"context_parallel_size": 2, "zero_stage": 3}, 4 / 4, 4 / 4, 8 / 4),
    ],
)
def test_bytes_per_parameter_between_steps(microbatches, dp, options, weights, gradients, optimizer) -> None:
    per_parameter = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    expected = {kind: count * WHOLE for kind, count in per_parameter.items()}
    assert states(shape_of(microbatches, dp, **options), 0) == pytest.approx(expected)


TWO_LAYERS = 2 * LAYER + 2 * TABLE + H
"""The weights that ZeRO 3 gathers at the same time: a layer, the next one, and both ends of the model."""


@pytest.mark.parametrize(
    "microbatches, options, weights, gradients, optimizer",
    [
        # Weights are 16-bit copies beside the optimizer's float32 shard, or float32 beside a shard of the same.
        (2, {**BF16, "zero_stage": 1}, 2 * WHOLE, 4 * WHOLE, 12 * WHOLE / 4),
        (3, {"zero_stage": 1}, 4 * WHOLE + 4 * WHOLE / 4, 4 * WHOLE, 8 * WHOLE / 4),
        (1, {"zero_stage": 1}, 4 * WHOLE + 4 * WHOLE / 4, 4 * WHOLE / 4, 8 * WHOLE / 4),
        (3, {"zero_stage": 2}, 4 * WHOLE + 4 * WHOLE / 4, 4 * WHOLE / 4, 8 * WHOLE / 4),
        (3, {**BF16, "zero_stage": 3}, 2 * TWO_LAYERS, 4 * WHOLE / 4, 12 * WHOLE / 4),
        (3, {"zero_stage": 3}, 4 * TWO_LAYERS + 4 * WHOLE / 4, 4 * WHOLE / 4, 8 * WHOLE / 4),
    ],
)
def test_sharded_states_in_a_step(microbatches, options, weights, gradients, optimizer) -> None:
    estimate = rank_memory(shape_of(microbatches, dp=4, **options), 0)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == pytest.approx((weights, gradients, optimizer))


def test_a_pipeline_sums_sharded_gradients_until_its_last_microbatch() -> None:
    half = LAYERS // 2 * LAYER + TABLE
    estimate = rank_memory(shape_of(4, dp=2, **PP2, zero_stage=2), 0)
    assert (estimate.weights, estimate.gradients) == pytest.approx((4 * half + 4 * half / 2, 4 * half))
    # With one layer per stage no next layer is gathered, but the output layer and final norm of the stage still are.
    lone = rank_memory(shape_of(4, dp=2, **PP2, num_layers=2, zero_stage=3, **BF16), 1)
    assert lone.weights == 2 * (LAYER + TABLE + H)
    # A stage without layers has the embedding alone.
    empty = rank_memory(shape_of(4, dp=2, **PP2, num_layer_list=("0", "8"), zero_stage=3, **BF16), 0)
    assert (empty.weights, empty.working) == (2 * TABLE, 0)
    # A layer is gathered together with the next one, of which every other one has experts.
    pairs = rank_memory(shape_of(4, dp=2, **EXPERTS, moe_layer_freq="2", zero_stage=3, **BF16), 0)
    assert pairs.weights == 2 * (SPARSE_LAYER + LAYER + 2 * TABLE + H)


@pytest.mark.parametrize(
    "options, rank, buffers",
    [
        ({}, 0, 0),
        # A rank receives a hidden state per microbatch from the stage before, and a gradient from the one after.
        (PP4, 0, 1),
        (PP4, 1, 2),
        (PP4, 3, 1),
        # Interleaved: stages 0 and 2 on rank 0 receive 3 in total, and keep the 3 they send until the step ends.
        ({**PP2, **INTERLEAVED}, 0, 6),
        ({**PP2, **INTERLEAVED}, 1, 6),
        # Zero bubble: stages 0 and 3 receive 2 and send 2, stages 1 and 2 receive 4 and send 2 to the other rank; and
        # the backward pass frees one gradient buffer: the one that the other rank has filled.
        ({**PP2, **ZBV}, 0, 5),
        ({**PP2, **ZBV}, 1, 7),
    ],
)
def test_pipeline_buffers(options: dict[str, Any], rank: int, buffers: int) -> None:
    assert rank_memory(shape_of(12, **options), rank).buffers == 12 * buffers * HIDDEN


def test_replicas_hold_all_gradients_once_more_while_they_are_sent() -> None:
    small = {"seq_length": 4, "micro_batch_size": 1}
    estimate = rank_memory(shape_of(1, dp=2, **small), 0)
    assert (estimate.activations, estimate.working, estimate.buffers) == (0, 0, 4 * WHOLE)
    # Experts on two ranks have no replicas, and their gradients are not sent.
    others = LAYERS * (SPARSE_LAYER - 8 * EXPERT) + 2 * TABLE + H
    for experts, options in ((8 * LAYERS * EXPERT, {}), (0, {"expert_model_parallel_size": 2})):
        assert rank_memory(shape_of(1, dp=2, **small, **EXPERTS, **options), 0).buffers == 4 * (others + experts)
    estimate = rank_memory(shape_of(1, **small, context_parallel_size=2), 0)
    assert estimate.buffers == 4 * WHOLE
    # In a pipeline the receive buffers are added; on the first rank, those that receive gradients.
    estimate = rank_memory(shape_of(2, dp=2, **small, **PP2), 0)
    assert estimate.buffers == 4 * (LAYERS // 2 * LAYER + TABLE) + 2 * 4 * H * 4
    # With sharded gradients, or activations larger than the sent tensors, the peak is in the backward pass.
    assert rank_memory(shape_of(1, dp=2, **small, zero_stage=1), 0).activations > 0
    assert rank_memory(shape_of(1, dp=2, micro_batch_size=64), 0).buffers == 0


@pytest.mark.parametrize(
    "options, bytes_per_element",
    [({}, 4), (TIED, 8), (BF16, 6), ({**BF16, **TIED}, 6), ({**PP2, **TIED}, 4), ({**PP2, **BF16}, 6)],
)
def test_the_end_of_a_backward_pass_holds_the_tables_gradient(options: dict[str, Any], bytes_per_element: int) -> None:
    # With few tokens, the peak is the table's float32 sum, and its 16-bit gradient or that of the output layer.
    few = {"seq_length": 4, "micro_batch_size": 1, "num_layers": 2}
    estimate = rank_memory(shape_of(2, vocabulary=1 << 16, **few, **options), 0)
    assert (estimate.working, estimate.activations) == ((1 << 16) * H * bytes_per_element, 0)
    assert rank_memory(shape_of(2, dp=2, vocabulary=1 << 16, **few, **options, zero_stage=1), 0).activations > 0


ROWS = TOKENS * 4
"""Bytes of one float32 channel of every token."""
WEIGHT = H * 2 * FFN * 4
"""Bytes of the largest weight of a layer, gate and up."""


@pytest.mark.parametrize(
    "dp, options, working",
    [
        # A first stage: gradients of gate and up, of the input of down, of a hidden state, and of the largest weight.
        (1, PP2, ROWS * (2 * FFN + FFN + H) + WEIGHT),
        (1, {**PP2, **TP2}, ROWS * (FFN + FFN // 2 + 3 * H) + WEIGHT / 2),
        (1, {**PP2, **TP2, **SP}, ROWS * (FFN + FFN // 2 + 5 * H) + WEIGHT / 2),
        (1, {**PP2, **BF16}, ROWS / 2 * (2 * FFN + FFN + H) + WEIGHT / 2),
        (1, {**PP2, "swiglu": False}, ROWS * (FFN + FFN + H) + WEIGHT / 2),
        # The gradients of a sharded layer exist unsharded in the model's dtype and as the float32 copy that is sent.
        (2, {**PP2, "zero_stage": 1}, ROWS * (2 * FFN + FFN + H) + WEIGHT),
        (2, {**PP2, "zero_stage": 2}, ROWS * (2 * FFN + FFN + H) + LAYER * 8),
        (2, {**PP2, **BF16, "zero_stage": 3}, ROWS / 2 * (2 * FFN + FFN + H) + LAYER * 6),
    ],
)
def test_a_backward_pass_works_on_one_layer_at_a_time(dp: int, options: dict[str, Any], working: float) -> None:
    assert rank_memory(shape_of(4, dp, micro_batch_size=B, **options), 0).working == working


def test_experts_and_latents_work_on_their_own_activations() -> None:
    sparse = shape_of(4, **PP2, **EXPERTS)
    weight = 8 * H * 2 * 32 * 4
    assert rank_memory(sparse, 0).working == ROWS * H + sparse.experts.working() + weight
    spread = shape_of(4, dp=2, **EXPERTS, expert_model_parallel_size=2)
    balanced, unbalanced = (memory(spread.config, spread.plan, *imbalance) for imbalance in ((), (2.0,)))
    assert balanced == rank_memory(spread, 0) and balanced.total < unbalanced.total
    narrow = shape_of(4, **PP2, **LATENT, ffn_hidden_size=8)
    assert rank_memory(narrow, 0).working == ROWS * H + narrow.latent.working() + H * 2 * 8 * 4


def test_recomputation_brings_one_chunk_of_layers_back() -> None:
    without = rank_memory(shape_of(4, **PP2), 0).working
    # A stage has four layers. With "block" the last of them have freed their activations before the first recompute.
    for method, count, layers in (("uniform", 2, 2), ("block", 4, 1), ("block", 3, 0), ("block", 2, 0)):
        options = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
        shape = shape_of(4, **PP2, **options)
        assert rank_memory(shape, 0).working == without + layers * layer_bytes(shape, 0)


def test_the_head_and_the_layers_do_not_work_at_once() -> None:
    layer = ROWS * (2 * FFN + FFN + H) + WEIGHT
    # A small head needs less than the working memory of a layer; the layers start after the head's memory is freed.
    shape = shape_of(4, vocabulary=16, **PP2)
    assert head_bytes(shape) < layer
    assert rank_memory(shape, 1).working == layer - head_bytes(shape)
    # Without a pipeline, the weight gradient of the layer is added to the sum in place,
    shape = shape_of(4, vocabulary=16)
    assert rank_memory(shape, 0).working == layer - WEIGHT - head_bytes(shape)
    # A large head needs the gradients of its input and of its weight,
    assert rank_memory(shape_of(4, vocabulary=1 << 14, **PP2), 1).working == ROWS * H + (1 << 14) * H * 4
    # and without a pipeline the weight gradient is added to the sum in place.
    assert rank_memory(shape_of(4, vocabulary=1 << 10, seq_length=512), 0).working == 512 * B * 4 * H


def test_a_rank_keeps_the_microbatches_in_flight() -> None:
    # Narayanan et al., section 2.2.1: 1F1B has one microbatch in flight per following stage.
    for rank in range(4):
        shape = shape_of(16, **PP4)
        assert rank_memory(shape, rank).activations == (4 - rank) * stage_bytes(shape, rank)
    assert rank_memory(shape_of(2, **PP2), 0).activations == 2 * stage_bytes(shape_of(2, **PP2), 0)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("vocabulary", [16, 256, 1 << 14])
@pytest.mark.parametrize(
    "layout",
    [
        {},
        PP4,
        {**PP2, **INTERLEAVED},
        {**PP2, **ZBV},
        {**PP4, "num_layer_list": ("1", "1", "5", "1")},
        {**PP4, "num_layer_list": ("1", "5", "1", "1")},
        {**PP4, "num_layer_list": ("1", "1", "1", "5")},
        {**PP4, **EXPERTS, "moe_ffn_hidden_size": 512, "moe_layer_freq": "[0,0,0,0,1,1,0,0]"},
    ],
    ids=str,
)
def test_the_plan_is_that_of_the_fullest_rank(layout: dict[str, Any], vocabulary: int, dp: int) -> None:
    shape = shape_of(8, dp, vocabulary, **layout)
    ranks = [rank_memory(shape, rank) for rank in range(shape.plan.layout.pp)]
    assert memory(shape.config, shape.plan) == max(ranks, key=lambda m: m.total)


def test_the_second_rank_of_a_pipeline_may_be_the_fullest() -> None:
    # It receives hidden states and gradients, and keeps more microbatches than the ranks after it.
    shape = shape_of(32, **PP4, **FULL)
    assert memory(shape.config, shape.plan) == rank_memory(shape, 1) != rank_memory(shape, 2)


def test_the_report_names_the_largest_first() -> None:
    estimate = Memory(weights=2 << 30, gradients=4 << 30, optimizer=0, activations=1 << 29, buffers=0, working=1 << 28)
    assert estimate.total == 2**31 + 2**32 + 2**29 + 2**28 and gib(3 << 30) == 3
    assert explain(estimate) == "gradients 4.0, weights 2.0, activations 0.5, working 0.2"
