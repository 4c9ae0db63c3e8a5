"""--tp-comm-overlap: the same bits as without it on cpu_ref, through the ops that a backend can overlap."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from parallel_runs import COMMON, DROPOUT, GPT2, LATENT_DENSE, LLAMA, RECOMPUTE, SP, TP2, TP4, close, on, steps

from hal import ops
from hal.model.config.command_line import build, read
from hal.model.config.schema import ConfigError
from hal.testing.processes import run_processes

OVERLAP = {**TP2, **SP, "tp_comm_overlap": True}
NAMES = ("all_gather_linear", "linear_reduce_scatter")


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [
        pytest.param({**GPT2, **DROPOUT, **RECOMPUTE}, id="gpt2, recomputed"),
        pytest.param({**LLAMA, "bf16": True}, id="llama, 16 bits", marks=pytest.mark.slow),
        pytest.param(LATENT_DENSE, id="latent", marks=pytest.mark.slow),
        pytest.param({**GPT2, "zero_stage": 1}, id="sharded optimizer", marks=pytest.mark.nightly),
        pytest.param({**LLAMA, "pipeline_model_parallel_size": 2}, id="pipeline", marks=pytest.mark.nightly),
    ],
)
def test_the_bits_are_those_without_the_option(base: dict[str, Any]) -> None:
    world = 2 * base.get("pipeline_model_parallel_size", 1) * (2 if "zero_stage" in base else 1)
    assert on(world, {**base, **OVERLAP}, 3) == on(world, {**base, **TP2, **SP}, 3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [OVERLAP, {**OVERLAP, **TP4}], ids=["tp2", "tp4"])
def test_it_trains_as_one_process(layout: dict[str, Any]) -> None:
    world = layout["tensor_model_parallel_size"]
    close(on(world, {**LLAMA, **DROPOUT, **layout}, 5), on(1, {**LLAMA, **DROPOUT}, 5), 1e-5, 1e-4)


def _calls(options: dict[str, Any]) -> Counter[str]:
    """How often a step calls each of the two ops."""
    counts: Counter[str] = Counter()
    for name in NAMES:
        original = getattr(ops, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **how: Any) -> Any:
            counts[_name] += 1
            return _original(*args, **how)

        setattr(ops, name, counted)
    steps(options, 1)
    return counts


def test_every_product_of_a_layer_is_one_op_with_its_communication() -> None:
    """A layer has two products of each kind, the output layer another that gathers; a row-parallel product's backward
    pass gathers, too, whereas a column-parallel one's transfers overlap with the products of both its gradients."""
    microbatches, layers = GPT2["global_batch_size"], GPT2["num_layers"]
    counts = {NAMES[0]: microbatches * (2 * layers + 1 + 2 * layers), NAMES[1]: microbatches * 2 * layers}
    assert run_processes(2, _calls, {**GPT2, **OVERLAP}) == [counts] * 2
    assert run_processes(2, _calls, {**GPT2, **TP2, **SP}) == [{}] * 2


@pytest.mark.parametrize(
    "options, reason",
    [
        (TP2, "overlaps the gathers and reduce-scatters of --sequence-parallel"),
        ({}, "overlaps the gathers and reduce-scatters of --sequence-parallel"),
        ({**TP2, **SP, "bf16": True, "fp8_format": "hybrid"}, "no products of float8"),
    ],
)
def test_it_is_refused_without_sequence_parallelism_and_with_float8(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=reason):
        build({**COMMON, **options, "tp_comm_overlap": True})


@pytest.mark.parametrize(
    "option, others, why",
    [
        ("--tp-comm-overlap", [], "it overlaps the gathers and reduce-scatters of --sequence-parallel"),
        ("--use-ascend-mc2", [], "it overlaps the gathers and reduce-scatters of --sequence-parallel"),
        (
            "--tp-comm-overlap",
            ["--sequence-parallel", "--bf16", "--fp8-format", "hybrid"],
            "no backend has products of",
        ),
    ],
)
def test_a_command_line_is_told_why_nothing_overlaps(
    option: str, others: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = "--backend cpu_ref --tensor-model-parallel-size 2 --global-batch-size 4"
    given = read([*line.split(), option, *others], {})
    assert "tp_comm_overlap" not in given and any(f"has no effect: {why}" in note for note in given.notes)
