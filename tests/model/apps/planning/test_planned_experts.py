"""The planner's parameters, bytes and traffic of mixtures of experts, against those of trainers on one and two ranks.

Routing decides how many rows a rank gets. The mean over the ranks does not depend on it and is compared with balanced
routing; the largest is compared with the formula for the imbalance that was measured.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal
from hal.bench.parallel import tensor_bytes
from hal.bench.suites.scaling import BF16, CP2, DEEPSEEK, EP2, MIXTRAL, PADDED, SP, TP2, plan_of
from hal.model.apps.planning.activations import stage_bytes
from hal.model.apps.planning.memory import memory, rank_memory, states
from hal.model.apps.planning.shape import Shape, total_parameters
from hal.model.apps.planning.traffic import traffic
from hal.model.gpt.model import GPT as Model
from hal.testing.processes import run_processes

ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
ETP1 = {"expert_tensor_parallel_size": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
ONE_RANK = {
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "geglu": {**MIXTRAL, "swiglu": False, "geglu": True},
    "dropping": {**MIXTRAL, "moe_expert_capacity_factor": 1.5},
    "padded": {**MIXTRAL, **PADDED},
    "recomputed": {**DEEPSEEK, **BLOCK},
}


@pytest.fixture(autouse=True)
def backend() -> None:
    hal.use("cpu_ref")


@pytest.mark.parametrize("options", [MIXTRAL, DEEPSEEK])
def test_parameters_to_the_element(options: dict[str, Any]) -> None:
    config, plan = plan_of(options, 1)
    model = Model(config, torch.device("cpu"), layers=plan.layers[0])
    shape = Shape.of(config, plan)
    assert shape.parameters(0) == total_parameters(config) == sum(p.numel() for p in model.parameters())
    assert shape.expert_parameters(0) == sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_RANK)
def test_bytes_on_one_rank(kind: str) -> None:
    # The second microbatch, which has the gradients of the first beside it, holds as much as all that would follow.
    options = {**ONE_RANK[kind], "global_batch_size": 2}
    config, plan = plan_of(options, 1)
    assert tensor_bytes.activation_bytes(options) == pytest.approx(stage_bytes(Shape.of(config, plan), 0), rel=0.001)
    assert tensor_bytes.peak_bytes(options) == pytest.approx(memory(config, plan).total, rel=0.06)


@pytest.mark.parametrize("options", [{**MIXTRAL, **BF16}, {**DEEPSEEK, **BF16}])
def test_state_and_16_bit_activations(options: dict[str, Any]) -> None:
    config, plan = plan_of(options, 1)
    shape = Shape.of(config, plan)
    assert tensor_bytes.state_bytes(options) == states(shape, 0)
    rounding = 4 * 64 * 64 * 2  # which cpu_ref's attention keeps, in every layer
    assert tensor_bytes.activation_bytes(options) - rounding == pytest.approx(stage_bytes(shape, 0), rel=0.001)


def _measured(options: dict[str, Any]) -> tuple[Any, float, float, tuple[float, float]]:
    hal.use("cpu_ref")
    # Weights that fully_shard gathers are live in its forward pass, so activations cannot be measured separately.
    kept = float("nan") if options.get("zero_stage") else tensor_bytes.activation_bytes(options)
    sent = tensor_bytes.sent_to_experts(options)
    return tensor_bytes.state_bytes(options), kept, tensor_bytes.peak_bytes(options), sent


TWO_RANKS = {
    "ep2": {**MIXTRAL, **EP2},
    "deepseek-ep2": {**DEEPSEEK, **EP2},
    "ep2-allgather": {**MIXTRAL, **EP2, **ALL_GATHER},
    "ep2-padded": {**MIXTRAL, **EP2, **PADDED},
    "etp2": {**MIXTRAL, **TP2, **SP},
    "ep2-tp2": {**DEEPSEEK, **TP2, **SP, **EP2, **ETP1},
    "ep2-cp2": {**DEEPSEEK, **CP2, **EP2},
    "ep2-recomputed": {**MIXTRAL, **EP2, "recompute_granularity": "full", "recompute_method": "uniform"},
    "ep2-zero1": {**DEEPSEEK, **EP2, "zero_stage": 1},
    "ep2-zero2-bf16": {**DEEPSEEK, **EP2, **BF16, "zero_stage": 2},
    "dp2-zero1": {**MIXTRAL, "zero_stage": 1},
}


MARKS = {"deepseek-ep2": pytest.mark.slow}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=MARKS.get(k, pytest.mark.nightly)) for k in TWO_RANKS],
)
def test_two_ranks(kind: str) -> None:
    options = TWO_RANKS[kind]
    config, plan = plan_of(options, 2)
    shape = Shape.of(config, plan)
    results = run_processes(2, _measured, options, timeout=240.0)
    for state, _, _, _ in results:
        assert state == states(shape, 0)
    kept, peak, sent, rows = (sum(values) / 2 for values in zip(*((k, p, *s) for _, k, p, s in results)))
    if not plan.zero:
        assert kept == pytest.approx(stage_bytes(shape, 0), rel=0.005)
    assert peak == pytest.approx(rank_memory(shape, 0).total, rel=0.06)
    assert sent == pytest.approx(traffic(shape).experts, rel=0.08 if plan.layout.ep > 1 else 1e-9)
    assert sent > 0 or plan.layout.ep * plan.layout.etp == 1
    # The rank with the most rows sends back the most results.
    imbalance = max(s[1] for *_, s in results) / rows
    if plan.layout.ep > 1 and not config.moe_pad_expert_input_to_capacity:
        assert imbalance > 1.0
        assert rank_memory(Shape.of(config, plan, imbalance), 0).total >= 0.97 * max(p for _, _, p, _ in results)


def test_what_the_imbalance_changes() -> None:
    config, plan = plan_of({**MIXTRAL, **EP2}, 2)
    even, uneven = (Shape.of(config, plan, factor).experts for factor in (1.0, 1.5))
    assert even is not None and uneven is not None
    tokens, k = 64, 2
    assert (even.rows, uneven.rows) == (tokens * k, 1.5 * tokens * k)
    per_row = 64 * 4 + 48 * 3 * 4 + 4 + 8  # input, gate, up and their product, probability, place in the permutation
    assert uneven.activations() - even.activations() == 0.5 * tokens * k * per_row
    # Of the rows that are multiplied here, half came from the other rank, and their results go back.
    assert uneven.sent_forward() - even.sent_forward() == 0.5 * tokens * k / 2 * 64 * 4
    limited = Shape.of(*plan_of({**MIXTRAL, **EP2, "moe_expert_capacity_factor": 1.25}, 2), 1.5).experts
    assert limited is not None and limited.rows == 1.25 * tokens * k, "a capacity bounds the imbalance"
    alone = Shape.of(*plan_of(MIXTRAL, 2), 1.5).experts
    assert alone is not None and alone.rows == tokens * k, "with all experts on every rank, rows are its own"


def test_weights_of_experts_are_sharded_over_their_own_replicas() -> None:
    options = {**MIXTRAL, "expert_model_parallel_size": 4, "zero_stage": 1}
    config, plan = plan_of({**options, "global_batch_size": 8}, 8)
    shape = Shape.of(config, plan)
    experts, others = shape.expert_parameters(0), shape.parameters(0) - shape.expert_parameters(0)
    assert experts == 2 * 3 * 64 * 48 * 4, "two of eight experts in each of four layers"
    assert states(shape, 0)["optimizer"] == 8 * (others / 8 + experts / 2)
    assert traffic(shape).data == pytest.approx((4 + 4) * (7 / 8 * others + 1 / 2 * experts))
