"""The planner's parameters, bytes and traffic of latent attention, against those of trainers on one and two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal
from hal.bench.parallel import tensor_bytes
from hal.bench.suites.scaling import BF16, BLOCK, CP2, DEEPSEEK, EP2, LATENT, LLAMA, SP, TP2, UNIFORM, plan_of
from hal.model.apps.planning.activations import stage_bytes
from hal.model.apps.planning.memory import memory, rank_memory, states
from hal.model.apps.planning.shape import Shape, total_parameters
from hal.model.apps.planning.speed import _layer
from hal.model.apps.planning.traffic import context_forward
from hal.model.config.flops import attention_weights
from hal.model.gpt.model import GPT as Model
from hal.testing.processes import run_processes

LLAMA_LATENT = {**LLAMA, **LATENT}
SELECTIVE = {"recompute_granularity": "selective"}
NAIVE = {"use_flash_attn": False}
ULYSSES = {"context_parallel_algo": "ulysses"}
ONE_RANK: dict[str, dict[str, Any]] = {
    "llama": {},
    "no latent of queries": {"q_lora_rank": None},
    "no norms": {"qk_layernorm": False},
    "LayerNorm": {"normalization": "LayerNorm", "disable_bias_linear": False},
    "two sequences": {"micro_batch_size": 2},
    "BSH": {"shape_order": "BSH"},
    "SBND": {"shape_order": "SBND"},
    "BNSD": {"shape_order": "BNSD"},
    "scores": NAIVE,
    "selective": SELECTIVE,
    "BSH selective": {"shape_order": "BSH", **SELECTIVE},
    "scores selective": {**NAIVE, **SELECTIVE},
    "recompute all": UNIFORM,
    "many heads": {"num_attention_heads": 8, "ffn_hidden_size": 64},
    "DeepSeek": DEEPSEEK,
}


@pytest.fixture(autouse=True)
def backend() -> None:
    hal.use("cpu_ref")


@pytest.mark.parametrize("kind", ["llama", "no latent of queries", "no norms", "LayerNorm", "DeepSeek"])
def test_parameters_to_the_element(kind: str) -> None:
    config, plan = plan_of({**LLAMA_LATENT, **ONE_RANK[kind]}, 1)
    model = Model(config, torch.device("cpu"), layers=plan.layers[0])
    count = sum(p.numel() for p in model.parameters())
    assert Shape.of(config, plan).parameters(0) == total_parameters(config) == count


@pytest.mark.parametrize("kind", ONE_RANK)
def test_bytes_on_one_rank(kind: str) -> None:
    # The second microbatch, which has the gradients of the first beside it, holds as much as all that would follow.
    options = {**LLAMA_LATENT, **ONE_RANK[kind]}
    options["global_batch_size"] = 2 * options["micro_batch_size"]
    config, plan = plan_of(options, 1)
    assert tensor_bytes.activation_bytes(options) == pytest.approx(stage_bytes(Shape.of(config, plan), 0), rel=0.01)
    assert tensor_bytes.peak_bytes(options) == pytest.approx(memory(config, plan).total, rel=0.06)


def test_state_and_16_bit_activations() -> None:
    options = {**LLAMA_LATENT, **BF16}
    config, plan = plan_of(options, 1)
    shape = Shape.of(config, plan)
    assert tensor_bytes.state_bytes(options) == states(shape, 0)
    rounding = 4 * 64 * 4 * 12 * 2  # which cpu_ref's attention keeps: layers, positions, heads of 12 channels, bytes
    assert tensor_bytes.activation_bytes(options) - rounding == pytest.approx(stage_bytes(shape, 0), rel=0.01)


def _measured(options: dict[str, Any]) -> tuple[float, float]:
    hal.use("cpu_ref")
    return tensor_bytes.activation_bytes(options), tensor_bytes.peak_bytes(options)


TWO_RANKS = {
    "tp2": TP2,
    "tp2-sp": {**TP2, **SP},
    "tp2-sp-no-query-latent": {**TP2, **SP, "q_lora_rank": None},
    "tp2-sp-recomputed": {**TP2, **SP, **UNIFORM},
    "cp2": CP2,
    "cp2-ulysses": {**CP2, **ULYSSES},
    "deepseek-ep2": {**DEEPSEEK, **EP2},
    "deepseek-ep2-block": {**DEEPSEEK, **EP2, **BLOCK, "recompute_num_layers": 2},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k == "tp2-sp" else pytest.mark.nightly) for k in TWO_RANKS]
)
def test_two_ranks(kind: str) -> None:
    options = {**LLAMA_LATENT, **TWO_RANKS[kind]}
    config, plan = plan_of(options, 2)
    shape = Shape.of(config, plan)
    kept, peak = (sum(values) / 2 for values in zip(*run_processes(2, _measured, options, timeout=240.0)))
    assert kept == pytest.approx(stage_bytes(shape, 0), rel=0.02)
    assert peak == pytest.approx(rank_memory(shape, 0).total, rel=0.08)


def test_context_parallel_ranks_send_keys_and_values_of_their_sizes() -> None:
    ring = Shape.of(*plan_of({**LLAMA_LATENT, **CP2}, 2))
    assert context_forward(ring) == 32 * 4 * 4 * (24 + 12)
    ulysses = Shape.of(*plan_of({**LLAMA_LATENT, **CP2, **ULYSSES}, 2))
    assert context_forward(ulysses) == 32 * 4 * 4 * (24 + 24 + 12 + 12) / 2


def test_floating_point_operations_of_a_layer() -> None:
    shape = Shape.of(*plan_of(LLAMA_LATENT, 1))
    config, tokens, pairs = shape.config, 64, 65 / 2
    weights = attention_weights(config) + 3 * 64 * 192
    assert _layer(shape, 0)[0] == 3 * (2 * tokens * weights + 2 * tokens * 4 * (24 + 12) * pairs)
    # Without sequence parallelism each tensor-parallel rank computes the latents of all tokens.
    halves = [Shape.of(*plan_of({**LLAMA_LATENT, **TP2, **more}, 2)) for more in ({}, SP)]
    (whole, _), (shared, _) = (_layer(half, 0) for half in halves)
    assert whole - shared == 3 * 2 * (tokens / 2) * 64 * 48
    assert shared == _layer(shape, 0)[0] / 2
