"""What is laid out where, and what is refused before anything starts, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from runs import GPT2, LLAMA

from hal.model.arguments import build
from hal.model.config import ConfigError
from hal.model.parallel.plan import make_plan

PP2, PP3, PP4 = ({"pipeline_model_parallel_size": n} for n in (2, 3, 4))


def plan(world: int, monkeypatch: pytest.MonkeyPatch, base: dict[str, Any] = GPT2, **options: Any):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    return make_plan(build({**base, **options}), world)


def test_an_even_split(monkeypatch) -> None:
    p = plan(4, monkeypatch, **PP2)
    assert (p.layout.dp, p.schedule, p.layers, p.microbatches) == (2, "1f1b", ((0, 1), (2, 3)), 4)


def test_interleaved_stages_go_round(monkeypatch) -> None:
    p = plan(2, monkeypatch, **PP2, num_layers=8, num_layers_per_virtual_pipeline_stage=2)
    assert p.layers == ((0, 1), (2, 3), (4, 5), (6, 7)) and [p.stages_of(r) for r in (0, 1)] == [[0, 2], [1, 3]]


def test_zero_bubble_stages_go_there_and_back(monkeypatch) -> None:
    p = plan(2, monkeypatch, **PP2, pipeline_schedule="zbv")
    assert [p.stages_of(r) for r in (0, 1)] == [[0, 3], [1, 2]]


def test_a_layer_list_and_noop_layers(monkeypatch) -> None:
    assert plan(2, monkeypatch, **PP2, num_layer_list=("1", "3")).layers == ((0,), (1, 2, 3))
    assert plan(2, monkeypatch, **PP2, noop_layers=("0", "3")).layers == ((1,), (2,))


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "sequence parallel without TP": (1, {"sequence_parallel": True}, "needs --tensor-model-parallel-size > 1"),
    "heads not divisible": (8, {"tensor_model_parallel_size": 8}, "does not divide --num-attention-heads 4"),
    "groups not divisible": (4, {"tensor_model_parallel_size": 4, "num_query_groups": 2}, "--num-query-groups 2"),
    "ffn not divisible": (4, {"tensor_model_parallel_size": 4, "ffn_hidden_size": 66}, "--ffn-hidden-size 66"),
    "vocabulary": (2, {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 11}, "padded vocabulary 121"),
    "world": (3, {"tensor_model_parallel_size": 2}, "do not divide a world of 3"),
    "layers not divisible": (2, {**PP2, "num_layers": 5}, "--num-layers 5 is not divisible by 2 stages"),
    "layer list": (2, {**PP2, "num_layer_list": ("1", "2")}, "sum to --num-layers 4"),
    "layer list length": (2, {**PP2, "num_layer_list": ("1", "1", "2")}, "one count for each of 2 stages"),
    "layer list without PP": (1, {"num_layer_list": ("4",)}, "needs --pipeline-model-parallel-size"),
    "noop of a whole stage": (4, {**PP4, "num_layers": 8, "noop_layers": ("2", "3")}, "leaves nothing on stage 1 of 4"),
    "noop of a virtual stage": (2, {**PP2, "pipeline_schedule": "zbv", "noop_layers": ("0", "2")}, "on stage 2 of 4"),
    "noop of a listed stage": (3, {**PP3, "num_layer_list": ("1", "1", "2"), "noop_layers": ("1",)}, "stage 1 of 3"),
    "noop": (2, {**PP2, "noop_layers": ("4",)}, "numbers of layers, 0 to 3"),
    "virtual without PP": (1, {"num_layers_per_virtual_pipeline_stage": 1}, "needs --pipeline-model-parallel-size"),
    "virtual leaves one": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 2}, "that is not interleaving"),
    "virtual not divisible": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 3}, "not divisible"),
    "microbatches for the stages": (2, {**PP2, "global_batch_size": 1}, "needs at least 2 microbatches"),
    "microbatches": (
        2,
        {**PP2, "num_layers_per_virtual_pipeline_stage": 1, "global_batch_size": 3},
        "makes 3 per replica",
    ),
    "zbv resharding": (4, {**PP2, "pipeline_schedule": "zbv", "zero_stage": 3}, "wrong gradients"),
    "zbv microbatches": (2, {**PP2, "pipeline_schedule": "zbv", "global_batch_size": 3}, "at least 4 microbatches"),
    "zbv and virtual": (
        2,
        {**PP2, "pipeline_schedule": "zbv", "num_layers_per_virtual_pipeline_stage": 1},
        "two stages per rank",
    ),
    "zbv overlap": (4, {**PP2, "pipeline_schedule": "zbv", "overlap_grad_reduce": True}, "weight gradients come last"),
    "zbv 16-bit zero": (4, {**PP2, "pipeline_schedule": "zbv", "zero_stage": 1, "bf16": True}, "in 16 bits"),
    "batch": (2, {"global_batch_size": 3}, "is not divisible by --micro-batch-size 1 x 2 data-parallel replicas"),
    "zero alone": (1, {"zero_stage": 2}, "there is only one"),
    "zero twice": (2, {"zero_stage": 2, "use_distributed_optimizer": True}, "give one of them"),
    "overlap alone": (1, {"overlap_grad_reduce": True}, "nothing to reduce"),
    "overlap with zero": (2, {"overlap_grad_reduce": True, "zero_stage": 1}, "is for replicated gradients"),
    "bucket ignored": (1, {"ddp_bucket_size": 100}, "would be ignored"),
    "ring parts": (2, {"context_parallel_size": 2, "seq_length": 14}, "not divisible into 4 parts"),
    "ring without flash": (2, {"context_parallel_size": 2, "use_flash_attn": False}, "remove --no-flash-attn"),
    "ulysses heads": (
        4,
        {"context_parallel_size": 4, "context_parallel_algo": "ulysses", "num_query_groups": 2},
        "use ring",
    ),
    "experts": (2, {"expert_model_parallel_size": 2}, "no experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_or_meaningless_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, options, reason = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        plan(world, monkeypatch, LLAMA if "ulysses" in name else GPT2, **options)
    assert reason in str(error.value)
