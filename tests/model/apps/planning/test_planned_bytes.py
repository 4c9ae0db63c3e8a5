"""The planner's byte counts match the trainer's: parameters to the element, the rest within a few percent.

In one process here; `hal bench scaling --check` does the same for every kind of layout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal
from hal.bench.parallel import tensor_bytes
from hal.bench.suites import scaling
from hal.bench.suites.scaling import BF16, GPT, LLAMA, SP, TP2, UNIFORM, plan_of
from hal.model.apps.planning.activations import stage_bytes
from hal.model.apps.planning.memory import memory, rank_memory, states
from hal.model.apps.planning.shape import Shape, total_parameters
from hal.model.gpt.model import GPT as Model
from hal.testing.processes import run_processes

SANDWICH = {"use_sandwich_norm": True}
GROUPED = {"num_query_groups": 2}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
NAIVE = {"use_flash_attn": False}
TWO_MICROBATCHES = {"global_batch_size": 2}
"""The second, which has the gradients of the first beside it, holds as much as all that would follow."""


@pytest.fixture(autouse=True)
def backend() -> None:
    hal.use("cpu_ref")


@pytest.mark.parametrize(
    "options",
    [GPT, LLAMA, {**GPT, **SANDWICH}, {**LLAMA, **GROUPED, "add_qkv_bias": True}, {**GPT, "noop_layers": ("0",)}],
)
def test_parameters_to_the_element(options) -> None:
    config, plan = plan_of(options, 1)
    model = Model(config, torch.device("cpu"), layers=plan.layers[0])
    count = sum(p.numel() for p in model.parameters())
    assert Shape.of(config, plan).parameters(0) == total_parameters(config) == count


@pytest.mark.parametrize("options", [GPT, {**LLAMA, **scaling.ZBV}])
def test_parameters_of_every_stage(options) -> None:
    config, plan = plan_of({**options, **scaling.PP2, "global_batch_size": 4}, 2)
    for rank in range(2):
        stages = [
            Model(config, torch.device("cpu"), layers=plan.layers[s], first=s == 0, last=s == plan.stages - 1)
            for s in plan.stages_of(rank)
        ]
        assert Shape.of(config, plan).parameters(rank) == sum(p.numel() for m in stages for p in m.parameters())


@pytest.mark.parametrize(
    "options",
    [
        GPT,
        LLAMA,
        {**GPT, "micro_batch_size": 2},
        {**GPT, **SANDWICH},
        {**GPT, **DROPOUT},
        {**LLAMA, **GROUPED},
        {**LLAMA, "shape_order": "SBND"},
        {**GPT, "shape_order": "BNSD"},
        {**GPT, **NAIVE},
        {**GPT, "use_parallel_residual": True},
        {**LLAMA, "output_logit_softcapping": 5.0, "embedding_multiplier_scale": 3.0, "residual_multiplier": 0.5},
        {**LLAMA, **NAIVE, "attn_logit_softcapping": 5.0},
        {**GPT, **NAIVE, **DROPOUT},
        {**GPT, **NAIVE, **BF16},
        {**GPT, **NAIVE, **DROPOUT, "recompute_granularity": "selective"},
        {**LLAMA, "recompute_granularity": "selective"},
        {**GPT, **UNIFORM},
        {**GPT, **UNIFORM, "recompute_num_layers": 3},
        {**LLAMA, **scaling.BLOCK, "recompute_num_layers": 3},
        {**GPT, "disable_bias_linear": True, "add_dense_bias": True, "add_mlp_bias": True},
        {**GPT, **NAIVE, "recompute_layer_list": ("2",), "select_recompute_layer_list": ("1",)},
    ],
)
def test_activations_of_a_microbatch(options) -> None:
    config, plan = plan_of(options, 1)
    assert tensor_bytes.activation_bytes(options) == pytest.approx(stage_bytes(Shape.of(config, plan), 0), rel=0.01)


@pytest.mark.parametrize("options", [{**GPT, **BF16}, {**LLAMA, **BF16, "fp32_residual_connection": True}])
def test_cpu_refs_attention_keeps_16_bit_rounding_errors_that_the_formula_leaves_out(options) -> None:
    config, plan = plan_of(options, 1)
    rest = 4 * 64 * 64 * 2  # layers, positions, channels, bytes
    assert tensor_bytes.activation_bytes(options) - rest == pytest.approx(
        stage_bytes(Shape.of(config, plan), 0), rel=0.01
    )


@pytest.mark.parametrize("options", [GPT, LLAMA, {**GPT, **BF16}, {**GPT, **BF16, "global_batch_size": 1}])
def test_state_between_steps(options) -> None:
    config, plan = plan_of(options, 1)
    assert tensor_bytes.state_bytes(options) == states(Shape.of(config, plan), 0)


@pytest.mark.parametrize("options", [GPT, LLAMA, {**GPT, **BF16}, {**LLAMA, **UNIFORM}, {**GPT, **NAIVE}])
def test_the_most_that_a_step_ever_holds(options) -> None:
    options = {**options, **TWO_MICROBATCHES}
    config, plan = plan_of(options, 1)
    assert tensor_bytes.peak_bytes(options) == pytest.approx(memory(config, plan).total, rel=0.06)


def test_further_microbatches_only_add_their_tokens() -> None:
    sequence = (GPT["seq_length"] + 1) * 8  # int64, with the last label
    more = GPT["global_batch_size"] - 2
    two = tensor_bytes.peak_bytes({**GPT, **TWO_MICROBATCHES})
    assert more == 6 and tensor_bytes.peak_bytes(GPT) == two + more * sequence


def test_gradients_become_float32_one_by_one() -> None:
    wide = {"num_layers": 6, "hidden_size": 256, "ffn_hidden_size": 1024, "seq_length": 16, "vocab_size": 512}
    options = {**GPT, **BF16, **wide, **TWO_MICROBATCHES}
    config, plan = plan_of(options, 1)
    assert tensor_bytes.peak_bytes(options) == pytest.approx(memory(config, plan).total, rel=0.02)


@pytest.mark.parametrize("options", [GPT, {**GPT, "global_batch_size": 1}, LLAMA, {**GPT, **BF16}, {**LLAMA, **BF16}])
def test_the_most_with_a_large_vocabulary(options) -> None:
    """Most of the memory is used by the embedding table, its gradients, and the logits."""
    options = {**options, "vocab_size": 8192, "global_batch_size": min(options["global_batch_size"], 2)}
    config, plan = plan_of(options, 1)
    assert tensor_bytes.peak_bytes(options) == pytest.approx(memory(config, plan).total, rel=0.01)


def _measured(options: dict[str, Any]) -> tuple[float | None, float]:
    hal.use("cpu_ref")
    # Weights gathered by fully_shard are live in its forward pass, so activations cannot be measured separately.
    return None if options.get("zero_stage") else tensor_bytes.activation_bytes(options), tensor_bytes.peak_bytes(
        options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{**GPT, **TP2, **SP}, {**LLAMA, **TP2, **SP, **UNIFORM}, {**GPT, **scaling.CP2}, {**GPT, "zero_stage": 2}],
)
def test_two_ranks(options) -> None:
    config, plan = plan_of(options, 2)
    shape = Shape.of(config, plan)
    for state_bytes, peak in run_processes(2, _measured, options):
        if state_bytes is not None:
            assert state_bytes == pytest.approx(stage_bytes(shape, 0), rel=0.02)
        assert peak == pytest.approx(rank_memory(shape, 0).total, rel=0.08)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loss_needs_no_second_buffer_of_logits(world) -> None:
    options = {**GPT, "vocab_size": 8192, "seq_length": 256, "global_batch_size": world}
    logits = 256 * 8192 * 4
    planned = rank_memory(Shape.of(*plan_of(options, world)), 0).total
    for _, peak in run_processes(world, _measured, options):
        assert planned - logits / 2 < peak < planned + logits / 2


def _whole(count: int, **options: Any) -> dict[str, float]:
    config, plan = plan_of({**GPT, "global_batch_size": 64, **options}, count)
    return states(Shape.of(config, plan), 0)


def test_optimizer_state_falls_as_one_over_the_replicas() -> None:
    one_rank = _whole(1)["optimizer"]
    for dp in (2, 4, 8, 64):
        assert _whole(dp, use_distributed_optimizer=True)["optimizer"] == one_rank / dp
    assert _whole(4)["optimizer"] == one_rank, "replicated without it"


def test_sequence_parallelism_divides_all_that_tensor_parallelism_leaves_whole() -> None:
    # Korthikanti et al., section 4.2.2: with both, the activations of a layer are all divided by t.
    def layers(options: dict[str, Any], world: int) -> float:
        one, two = ({**options, "num_layers": n} for n in (4, 8))
        (c1, p1), (c2, p2) = plan_of(one, world), plan_of(two, world)
        return stage_bytes(Shape.of(c2, p2), 0) - stage_bytes(Shape.of(c1, p1), 0)

    assert layers({**GPT, **TP2, **SP}, 2) == layers(GPT, 1) / 2
    assert layers({**GPT, **TP2}, 2) > layers(GPT, 1) / 2
    assert layers({**GPT, **UNIFORM}, 1) == 4 * 64 * 64 * 4, "one hidden state per layer: their 2 s b h, in float32"


def test_the_suites_cases_are_the_same_in_every_process(monkeypatch) -> None:
    here = scaling.cases()
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert [(c.name, c.shape, c.budgets) for c in scaling.cases()] == [(c.name, c.shape, c.budgets) for c in here]
    assert {c.name for c in here} >= {"peak of a step", "bubble", "activations of a microbatch"}
