"""Which shard is on which rank, and which layouts are refused before anything starts, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from parallel_runs import GPT2, LLAMA

from hal.mesh import Layout
from hal.model.config.command_line import build
from hal.model.config.parallel_layout import (
    ParallelLayout,
    make_parallel_layout,
    problems,
    ranks_of_replica,
    sums_in_place,
    zero_stage,
)
from hal.model.config.schema import Config, ConfigError

PP2, PP3, PP4 = ({"pipeline_model_parallel_size": n} for n in (2, 3, 4))


def plan(world: int, monkeypatch: pytest.MonkeyPatch, base: dict[str, Any] = GPT2, **options: Any):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    return make_parallel_layout(build({**base, **options}), world)


def test_an_even_split(monkeypatch) -> None:
    p = plan(4, monkeypatch, **PP2)
    assert (p.layout.dp, p.schedule, p.layers, p.microbatches) == (2, "1f1b", ((0, 1), (2, 3)), 4)


def test_interleaved_stages_go_round(monkeypatch) -> None:
    p = plan(2, monkeypatch, **PP2, num_layers=8, num_layers_per_virtual_pipeline_stage=2)
    assert p.schedule == "interleaved"
    assert p.layers == ((0, 1), (2, 3), (4, 5), (6, 7)) and [p.stages_of(r) for r in (0, 1)] == [[0, 2], [1, 3]]


def test_zero_bubble_stages_go_there_and_back(monkeypatch) -> None:
    p = plan(2, monkeypatch, **PP2, pipeline_schedule="zbv")
    assert [p.stages_of(r) for r in (0, 1)] == [[0, 3], [1, 2]]
    p = plan(3, monkeypatch, **PP3, pipeline_schedule="zbv", num_layers=6)
    assert [p.stages_of(r) for r in (0, 1, 2)] == [[0, 5], [1, 4], [2, 3]]


def test_a_layer_list_and_noop_layers(monkeypatch) -> None:
    assert plan(2, monkeypatch, **PP2, num_layer_list=("1", "3")).layers == ((0,), (1, 2, 3))
    assert plan(2, monkeypatch, **PP2, noop_layers=("0", "3")).layers == ((1,), (2,))


TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP2, CP3_ULYSSES = {"context_parallel_size": 2}, {"context_parallel_size": 3, "context_parallel_algo": "ulysses"}
CP4 = {"context_parallel_size": 4}
HYBRID = {"context_parallel_algo": "hybrid", "ulysses_degree_in_cp": 2}
SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 48, "vocab_size": 119, "make_vocab_size_divisible_by": 6}

REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "sequence parallel without TP": (1, {"sequence_parallel": True}, "needs --tensor-model-parallel-size > 1"),
    "heads not divisible": (
        8,
        {"tensor_model_parallel_size": 8},
        "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 8",
    ),
    "groups not divisible": (4, {"tensor_model_parallel_size": 4, "num_query_groups": 2}, "--num-query-groups 2"),
    "ffn not divisible": (4, {"tensor_model_parallel_size": 4, "ffn_hidden_size": 66}, "--ffn-hidden-size 66"),
    "every size": (3, {"tensor_model_parallel_size": 3}, "is not divisible by --tensor-model-parallel-size 3"),
    "vocabulary": (2, {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 11}, "padded vocabulary 121"),
    "two ids": (
        4,
        {"tensor_model_parallel_size": 4, "vocab_size": 2, "make_vocab_size_divisible_by": 1},
        "padded vocabulary 2 is not divisible",
    ),
    "world": (3, {"tensor_model_parallel_size": 2}, "world size 3 is not divisible by tp = 2"),
    "layers not divisible": (2, {**PP2, "num_layers": 5}, "--num-layers 5 is not divisible by 2 stages"),
    "layer list": (2, {**PP2, "num_layer_list": ("1", "2")}, "sum to --num-layers 4"),
    "layer list with nothing": (2, {**PP2, "num_layer_list": ("3", "0")}, "counts that sum to"),
    "layer list with nothing between": (3, {**PP3, "num_layer_list": ("2", "0", "2")}, "counts that sum to"),
    "layer list of words": (2, {**PP2, "num_layer_list": ("four", "0")}, "counts that sum to"),
    "layer list of virtual stages": (
        2,
        {**PP2, "num_layer_list": ("1", "1", "1", "1"), "num_layers_per_virtual_pipeline_stage": 1},
        "one count for each of 2 ranks",
    ),
    "layer list with zbv": (
        2,
        {**PP2, "num_layer_list": ("1", "3"), "pipeline_schedule": "zbv"},
        "needs --pipeline-schedule 1f1b",
    ),
    "layer list length": (2, {**PP2, "num_layer_list": ("1", "1", "2")}, "one count for each of 2 ranks"),
    "layer list without PP": (1, {"num_layer_list": ("4",)}, "needs --pipeline-model-parallel-size"),
    "noop of a whole stage": (
        4,
        {**PP4, "num_layers": 8, "noop_layers": ("2", "3")},
        "leaves no layer on stage 1 of 4",
    ),
    "noop of a virtual stage": (2, {**PP2, "pipeline_schedule": "zbv", "noop_layers": ("0", "2")}, "on stage 2 of 4"),
    "noop of a listed stage": (3, {**PP3, "num_layer_list": ("1", "1", "2"), "noop_layers": ("1",)}, "stage 1 of 3"),
    "noop without PP": (1, {"noop_layers": ("4",)}, "indices of layers, 0 to 3"),
    "noop before the first": (2, {**PP2, "noop_layers": ("-1",)}, "indices of layers, 0 to 3"),
    "zbv without PP": (1, {"pipeline_schedule": "zbv"}, "zbv needs --pipeline-model-parallel-size above 1"),
    "noop": (2, {**PP2, "noop_layers": ("4",)}, "indices of layers, 0 to 3"),
    "virtual without PP": (1, {"num_layers_per_virtual_pipeline_stage": 1}, "needs --pipeline-model-parallel-size"),
    "virtual leaves one": (
        2,
        {**PP2, "num_layers": 6, "num_layers_per_virtual_pipeline_stage": 3},
        "that is not interleaving",
    ),
    "virtual not divisible": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 3}, "not divisible"),
    "microbatches": (
        2,
        {**PP2, "num_layers_per_virtual_pipeline_stage": 1, "global_batch_size": 5},
        "gives 5 per replica",
    ),
    "zbv resharding": (4, {**PP2, "pipeline_schedule": "zbv", "zero_stage": 3}, "wrong gradients"),
    "zbv microbatches": (
        3,
        {**PP3, "pipeline_schedule": "zbv", "num_layers": 6, "global_batch_size": 5},
        "at least 6 microbatches",
    ),
    "zbv and virtual": (
        2,
        {**PP2, "pipeline_schedule": "zbv", "num_layers_per_virtual_pipeline_stage": 1},
        "two stages per rank",
    ),
    "zbv overlap": (
        4,
        {**PP2, "pipeline_schedule": "zbv", "overlap_grad_reduce": True},
        "computes weight gradients last",
    ),
    "zbv 16-bit zero": (4, {**PP2, "pipeline_schedule": "zbv", "zero_stage": 1, "bf16": True}, "in 16 bits"),
    "evaluation": (2, {"global_batch_size": 4, "eval_global_batch_size": 3}, "--eval-global-batch-size 3 is not div"),
    "evaluation in rounds": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 1,
            "global_batch_size": 4,
            "eval_global_batch_size": 2,
        },
        "evaluations have the batch size of training",
    ),
    "batch": (2, {"global_batch_size": 3}, "--global-batch-size 3 is not divisible by --micro-batch-size 1 x 2 data-p"),
    "batch of a ramp": (
        2,
        {"global_batch_size": 8, "rampup_batch_size": ("2", "3", "24")},
        "--rampup-batch-size: the batch size 5 is not divisible",
    ),
    "zero alone": (1, {"zero_stage": 2}, "there is only one"),
    "zero twice": (2, {"zero_stage": 2, "use_distributed_optimizer": True}, "give one of them"),
    "overlap alone": (1, {"overlap_grad_reduce": True}, "nothing to reduce"),
    "overlap with zero": (2, {"overlap_grad_reduce": True, "zero_stage": 1}, "gradients; --zero-stage overlaps"),
    "overlap with a distributed optimizer": (
        2,
        {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
        "gradients; --use-distributed-optimizer overlaps",
    ),
    "bucket ignored": (1, {"ddp_bucket_size": 100}, "would be ignored"),
    "ring parts": (2, {"context_parallel_size": 2, "seq_length": 14}, "not divisible by 4"),
    "hybrid without a degree": (
        4,
        {**CP4, "context_parallel_algo": "hybrid"},
        "a divisor of --context-parallel-size 4",
    ),
    "hybrid of one group": (4, {**CP4, **HYBRID, "ulysses_degree_in_cp": 4}, "with 4 ulysses"),
    "hybrid of one rank": (4, {**CP4, **HYBRID, "ulysses_degree_in_cp": 1}, "With 1 it is ring"),
    "hybrid parts": (4, {**CP4, **HYBRID, "seq_length": 10}, "not divisible by 4"),
    "hybrid without flash": (4, {**CP4, **HYBRID, "use_flash_attn": False}, "hybrid merges partial results"),
    "hybrid heads": (
        6,
        {"context_parallel_size": 6, **HYBRID, "ulysses_degree_in_cp": 3, "seq_length": 12},
        "hybrid distributes heads: --num-attention-heads 4 over 1 tensor-parallel ranks is not divisible by 3 ranks",
    ),
    "hybrid of uneven chunks": (
        6,
        {**SIX_HEADS, "context_parallel_size": 6, **HYBRID, "ulysses_degree_in_cp": 3, "seq_length": 12}
        | {"hidden_dropout": 0.1},
        "3 ranks (of --sequence-parallel, or that exchange heads) split the two chunks of a ring unevenly",
    ),
    "two chunks of a ring": (
        4,
        {"context_parallel_size": 4, "seq_length": 12},
        "--seq-length 12 is not divisible by 8",
    ),
    "recompute lists": (2, {**PP2, "recompute_layer_list": ("1",)}, "must be 2 numbers of layers"),
    "recompute lists of more layers": (2, {**PP2, "recompute_layer_list": ("5", "0")}, "must be 2 numbers of layers"),
    "recompute lists of virtual stages": (
        2,
        {**PP2, "num_layers_per_virtual_pipeline_stage": 1, "select_recompute_layer_list": ("1", "1")},
        "--select-recompute-layer-list 1,1 must be 4 numbers",
    ),
    "recompute lists and granularity": (
        1,
        {"recompute_layer_list": ("1",), "recompute_granularity": "selective"},
        "remove --recompute-granularity",
    ),
    "ring without flash": (2, {"context_parallel_size": 2, "use_flash_attn": False}, "remove --no-flash-attn"),
    "ulysses heads": (
        3,
        {"context_parallel_size": 3, "context_parallel_algo": "ulysses", "num_query_groups": 2, "seq_length": 12},
        "use ring",
    ),
    "ulysses heads of a tensor rank": (
        8,
        {"context_parallel_size": 4, "context_parallel_algo": "ulysses", "tensor_model_parallel_size": 2},
        "--num-attention-heads 4 over 2 tensor-parallel ranks is not divisible by 4 ranks; use ring",
    ),
    "sequence parts": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 15},
        "--seq-length 15 is not divisible by 2 tensor-parallel ranks",
    ),
    "context and sequence parts": (
        6,
        {**TP2_SP, **CP3_ULYSSES, "num_attention_heads": 6, "hidden_size": 48, "seq_length": 15},
        "not divisible by 3, and with --sequence-parallel by 6",
    ),
    "uneven chunks": (
        6,
        {**SIX_HEADS, "tensor_model_parallel_size": 3, "sequence_parallel": True, "context_parallel_size": 2}
        | {"seq_length": 24, "hidden_dropout": 0.1},
        "split the two chunks of a ring unevenly",
    ),
    "bucket with zero": (2, {"ddp_bucket_size": 100, "zero_stage": 1}, "would be ignored"),
    "experts": (2, {"expert_model_parallel_size": 2}, "needs --num-experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_or_meaningless_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, options, reason = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        plan(world, monkeypatch, LLAMA if "ulysses" in name else GPT2, **options)
    assert reason in str(error.value)


ACCEPTED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "any vocabulary without TP": (1, {"make_vocab_size_divisible_by": 11}),
    "fewer microbatches than stages": (2, {**PP2, "global_batch_size": 1}),
    "ends without layers": (3, {**PP3, "num_layer_list": ("0", "4", "0")}),
    "interleaved": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1, "global_batch_size": 2}),
    "interleaved in one round": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1, "global_batch_size": 3}),
    "zbv with twice as many": (2, {**PP2, "pipeline_schedule": "zbv", "global_batch_size": 4}),
    "zbv 16-bit": (2, {**PP2, "pipeline_schedule": "zbv", "bf16": True}),
    "zbv sharded": (4, {**PP2, "pipeline_schedule": "zbv", "zero_stage": 2}),
    "16-bit sharded": (4, {**PP2, "zero_stage": 3, "bf16": True}),
    "no layers on the first stage": (2, {**PP2, "noop_layers": ("0", "1")}),
    "no layers on the last stage": (2, {**PP2, "noop_layers": ("2", "3")}),
    "noop without PP": (1, {"noop_layers": ("0", "3")}),
    "sequence": (2, {**TP2_SP, "seq_length": 2}),
    "ring": (2, {**CP2, "seq_length": 4, "hidden_dropout": 0.1}),
    "ulysses of an odd number of ranks": (3, {**SIX_HEADS, **CP3_ULYSSES, "seq_length": 12, "hidden_dropout": 0.1}),
    "hybrid without CP": (1, {"context_parallel_algo": "hybrid"}),
    "ulysses without flash": (2, {**CP2, "context_parallel_algo": "ulysses", "seq_length": 2, "use_flash_attn": False}),
    "ring with even tensor ranks": (4, {**TP2_SP, **CP2, "hidden_dropout": 0.1}),
    "ring of uneven chunks without dropout": (
        6,
        {**SIX_HEADS, **CP2, "tensor_model_parallel_size": 3, "sequence_parallel": True, "seq_length": 24},
    ),
    "hybrid": (4, {**CP4, **HYBRID, "seq_length": 4, "hidden_dropout": 0.1}),
    "recompute lists": (2, {**PP2, "recompute_layer_list": ("4", "0"), "select_recompute_layer_list": ("0", "1")}),
    "overlap": (2, {"overlap_grad_reduce": True, "ddp_bucket_size": 100}),
    "context ranks are replicas": (2, {**CP2, "overlap_grad_reduce": True}),
    "sharded over context ranks": (2, {**CP2, "zero_stage": 3}),
    "distributed optimizer": (2, {"use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_just_possible_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, options = ACCEPTED[name]
    monkeypatch.setenv("WORLD_SIZE", str(world))
    config = build({**GPT2, **options})
    assert list(problems(config, world)) == []
    assert make_parallel_layout(config, world).layout.world == world


def test_what_does_not_apply_is_no_problem() -> None:
    assert list(problems(Config(tensor_model_parallel_size=2), 2)) == [], "the vocabulary is not known yet"
    alone = Config(pipeline_schedule="zbv", global_batch_size=1, micro_batch_size=1)
    assert list(problems(alone, 1)) == ["--pipeline-schedule zbv needs --pipeline-model-parallel-size above 1"]


def test_a_plan_counts_microbatches_per_replica_and_names_the_zero_stage(monkeypatch) -> None:
    p = plan(4, monkeypatch, micro_batch_size=2, global_batch_size=24, use_distributed_optimizer=True)
    assert (p.microbatches, p.zero, p.schedule, p.stages) == (3, 1, "none", 1)
    assert [plan(2, monkeypatch, zero_stage=n).zero for n in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert zero_stage(build(GPT2)) == 0


@pytest.mark.parametrize(
    "world, options, expected",
    [
        (1, {}, True),
        (2, {}, True),
        (2, {"overlap_grad_reduce": True}, False),
        (2, {**CP2, "overlap_grad_reduce": True}, False),
        (2, {"zero_stage": 1}, False),
        (2, PP2, False),
    ],
)
def test_where_products_may_add_to_the_gradients(
    world: int, options: dict[str, Any], expected: bool, monkeypatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    config = build({**GPT2, **options})
    assert sums_in_place(config, make_parallel_layout(config, world)) is expected


def test_experts_and_everything_else_fit_the_ranks_of_a_replica(monkeypatch) -> None:
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 3, **PP2}
    assert ranks_of_replica(Config(**sizes)) == 12
    experts = {"num_experts": 8, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    assert ranks_of_replica(Config(**sizes, **experts)) == 24, "4 ranks for experts and 6 for the rest, on both stages"
    assert ranks_of_replica(Config(**sizes, **experts | {"expert_tensor_parallel_size": 3})) == 24
    laid_out = plan(8, monkeypatch, num_experts=8, expert_model_parallel_size=4, disable_bias_linear=True).layout
    assert laid_out == Layout(dp=8, ep=4) and laid_out.edp == 2


def test_one_replica_has_no_reduction_to_overlap() -> None:
    assert sums_in_place(Config(overlap_grad_reduce=True), ParallelLayout(Layout(), "none", ((0,),), 4, 0))
