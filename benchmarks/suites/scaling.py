"""The effect of parallelism on one rank, measured and by formula: state and activation bytes, and pipeline bubbles.

Everything is counted (parallel/tensor_bytes.py), so the load of the machine has no effect. The peer of every row is a
formula of `hal.model.apps.planning`, which `hal plan` uses. The tables of docs/scaling.md come from this suite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hal.model.apps.planning.activations import stage_bytes
from hal.model.apps.planning.memory import rank_memory, states
from hal.model.apps.planning.schedules import bubble_formula
from hal.model.apps.planning.shape import Shape
from hal.model.apps.planning.traffic import traffic
from hal.model.config.parallel_layout import ParallelLayout, make_parallel_layout
from hal.model.config.schema import Config

from ..harness.case import OURS, Candidate, Case, Thunk
from ..parallel import tensor_bytes
from ..parallel.layout import config_of
from ..parallel.process_group import join

Options = Mapping[str, Any]
GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
LLAMA: dict[str, Any] = {
    **GPT,
    "ffn_hidden_size": 192,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "num_experts": 8,
    "moe_ffn_hidden_size": 48,
    "moe_aux_loss_coeff": ("0.01",),
}
DEEPSEEK: dict[str, Any] = {
    **MIXTRAL,
    "moe_layer_freq": "[0]+[1]*3",
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_z_loss_coeff": 0.01,
    "moe_shared_expert_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "qk_layernorm": True,
}
"""Latent attention of which every size is different. It needs rotary positions, as LLAMA has them."""
PADDED: dict[str, Any] = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
"""Every expert has the same number of rows, so that sizes do not depend on the routing."""
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
TP4: dict[str, Any] = {"tensor_model_parallel_size": 4}
SP: dict[str, Any] = {"sequence_parallel": True}
CP2: dict[str, Any] = {"context_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
PP4: dict[str, Any] = {"pipeline_model_parallel_size": 4}
ZBV: dict[str, Any] = {"pipeline_schedule": "zbv"}
BF16: dict[str, Any] = {"bf16": True}
UNIFORM: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform"}
BLOCK: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "block"}
SCORES: dict[str, Any] = {"use_flash_attn": False, "attention_dropout": 0.1}

STATES: list[tuple[str, int, Options]] = [
    ("DP 1", 1, {}),
    ("DP 4", 4, {}),
    ("DP 2 distributed optimizer", 2, {"use_distributed_optimizer": True}),
    ("DP 4 distributed optimizer", 4, {"use_distributed_optimizer": True}),
    ("DP 4 ZeRO 2", 4, {"zero_stage": 2}),
    ("DP 4 ZeRO 3", 4, {"zero_stage": 3}),
    ("Mixtral EP 2", 2, {**MIXTRAL, **EP2}),
    ("Mixtral EP 2 DP 4 distributed optimizer", 4, {**MIXTRAL, **EP2, "use_distributed_optimizer": True}),
]
ACTIVATIONS: list[tuple[str, int, Options]] = [
    ("GPT TP 1", 1, GPT),
    ("GPT TP 2", 2, {**GPT, **TP2}),
    ("GPT TP 2 + SP", 2, {**GPT, **TP2, **SP}),
    ("GPT TP 4", 4, {**GPT, **TP4}),
    ("GPT TP 4 + SP", 4, {**GPT, **TP4, **SP}),
    ("GPT CP 2 ring", 2, {**GPT, **CP2}),
    ("GPT CP 2 Ulysses", 2, {**GPT, **CP2, "context_parallel_algo": "ulysses"}),
    ("GPT scores kept", 1, {**GPT, **SCORES}),
    ("GPT scores kept, recompute selective", 1, {**GPT, **SCORES, "recompute_granularity": "selective"}),
    ("GPT recompute block 2", 1, {**GPT, **BLOCK, "recompute_num_layers": 2}),
    ("GPT recompute all", 1, {**GPT, **UNIFORM}),
    ("GPT recompute all by 2", 1, {**GPT, **UNIFORM, "recompute_num_layers": 2}),
    ("GPT TP 4 + SP recompute all", 4, {**GPT, **TP4, **SP, **UNIFORM}),
    ("Llama TP 1", 1, LLAMA),
    ("Llama TP 2 + SP", 2, {**LLAMA, **TP2, **SP}),
    ("Llama groups 2", 1, {**LLAMA, "num_query_groups": 2}),
    ("Mixtral", 1, MIXTRAL),
    ("Mixtral padded EP 2", 2, {**MIXTRAL, **PADDED, **EP2}),
    ("Mixtral TP 2 + SP ETP 2", 2, {**MIXTRAL, **TP2, **SP}),
    ("DeepSeek", 1, DEEPSEEK),
    ("DeepSeek padded EP 2 CP 2", 2, {**DEEPSEEK, **PADDED, **EP2, **CP2}),
    ("Llama latent attention", 1, {**LLAMA, **LATENT}),
    ("Llama latent attention TP 2 + SP", 2, {**LLAMA, **LATENT, **TP2, **SP}),
]
PEAKS: list[tuple[str, int, Options]] = [
    ("one process", 1, {}),
    ("one process bf16", 1, BF16),
    ("DP 2", 2, {}),
    ("TP 2 + SP", 2, {**TP2, **SP}),
    ("CP 2", 2, CP2),
    ("recompute all", 1, UNIFORM),
    ("DP 2 ZeRO 1", 2, {"zero_stage": 1}),
    ("DP 2 ZeRO 2 bf16", 2, {"zero_stage": 2, **BF16}),
    ("DP 2 ZeRO 3 bf16", 2, {"zero_stage": 3, **BF16}),
    ("PP 2 1F1B", 2, PP2),
    ("PP 2 interleaved", 2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}),
    ("PP 2 zero bubble", 2, {**PP2, **ZBV}),
    ("PP 2 DP 2 ZeRO 1", 4, {**PP2, "zero_stage": 1}),
    ("TP 2 + SP PP 2 recompute all", 4, {**PP2, **TP2, **SP, **UNIFORM}),
    ("Mixtral", 1, MIXTRAL),
    ("Mixtral padded EP 2", 2, {**MIXTRAL, **PADDED, **EP2}),
    ("DeepSeek padded EP 2 ZeRO 1", 2, {**DEEPSEEK, **PADDED, **EP2, "zero_stage": 1}),
    ("DeepSeek latent attention", 1, {**DEEPSEEK, **LATENT}),
]
TRAFFIC: list[tuple[str, int, Options]] = [
    ("Mixtral padded EP 2", 2, {**MIXTRAL, **PADDED, **EP2}),
    ("Mixtral EP 2 all-gather", 2, {**MIXTRAL, **EP2, "moe_token_dispatcher_type": "allgather"}),
    ("DeepSeek padded EP 4", 4, {**DEEPSEEK, **PADDED, "expert_model_parallel_size": 4}),
    ("DeepSeek padded EP 2 ETP 2", 4, {**DEEPSEEK, **PADDED, **TP2, **SP, **EP2}),
]
BUBBLES: list[tuple[str, int, Options]] = [
    *(("PP 2 1F1B", 2, {**PP2, "global_batch_size": m}) for m in (2, 8)),
    *(("PP 4 1F1B", 4, {**PP4, "global_batch_size": m}) for m in (4, 8, 16)),
    *(
        ("PP 4 interleaved", 4, {**PP4, "num_layers": 4 * v, **virtual, "global_batch_size": m})
        for virtual in [{"num_layers_per_virtual_pipeline_stage": 1}]
        for v, m in ((2, 4), (2, 8), (3, 8))
    ),
    ("PP 2 zero bubble", 2, {**PP2, **ZBV, "global_batch_size": 4}),
    *(("PP 4 zero bubble", 4, {**PP4, **ZBV, "num_layers": 8, "global_batch_size": m}) for m in (8, 16)),
]


def cases() -> list[Case]:
    """State, activations, the peak of a step, traffic to experts, and bubbles."""
    state = [
        _bytes(f"{kind} between steps", name, world, {**GPT, **options}, _state(kind), _state_formula(kind))
        for kind in ("weights", "gradients", "optimizer")
        for name, world, options in STATES
    ]
    activations = [
        _bytes("activations of a microbatch", name, world, options, tensor_bytes.activation_bytes, _activations)
        for name, world, options in ACTIVATIONS
    ]
    peaks = [
        _bytes("peak of a step", name, world, {**GPT, **options}, tensor_bytes.peak_bytes, _peak)
        for name, world, options in PEAKS
    ]
    exchanges = [
        _bytes("bytes sent to experts in a step", name, world, options, _sent, _sent_formula)
        for name, world, options in TRAFFIC
    ]
    # The embedding is untied. With a tied weight only the first and the last stage create a process group, after which
    # the ranks of a worker that continues with another layout would number their groups differently.
    untied = {"untie_embeddings_and_output_weights": True}
    bubbles = [_bubble(name, world, {**GPT, **untied, **options}) for name, world, options in BUBBLES]
    return [*state, *activations, *peaks, *exchanges, *bubbles]


def plan_of(options: Options, world: int) -> tuple[Config, ParallelLayout]:
    """The config and layout of `world` processes with these options."""
    config = config_of(options)
    return config, make_parallel_layout(config, world)


def _candidate(measure: Callable[[Options], float], world: int, options: Options) -> Candidate:
    def make() -> Thunk:
        join()
        return lambda: measure(options)

    return Candidate(make, f"hal {world}", ranks=world)


def _bytes(
    what: str,
    name: str,
    world: int,
    options: Options,
    measure: Callable[[Options], float],
    formula: Callable[[Config, ParallelLayout], float],
) -> Case:
    ours = {OURS: _candidate(measure, world, options)}
    return Case(what, name, ours, budgets={"formula": formula(*plan_of(options, world))}, quantity="counted bytes")


def _bubble(name: str, world: int, options: Options) -> Case:
    _, plan = plan_of(options, world)
    chunks, m = plan.stages // plan.layout.pp, plan.microbatches
    shape = f"{name}, {m} microbatches" + (f", {chunks} stages per rank" if chunks > 1 else "")
    formula = bubble_formula(plan.schedule, plan.layout.pp, chunks, m)
    ours = {OURS: _candidate(tensor_bytes.recorded_bubble, world, options)}
    return Case("bubble", shape, ours, budgets={"formula": formula}, quantity="counted share")


def _state(kind: str) -> Callable[[Options], float]:
    return lambda options: tensor_bytes.state_bytes(options)[kind]


def _state_formula(kind: str) -> Callable[[Config, ParallelLayout], float]:
    return lambda config, plan: states(Shape.of(config, plan), 0)[kind]


def _activations(config: Config, plan: ParallelLayout) -> float:
    return stage_bytes(Shape.of(config, plan), 0)


def _sent(options: Options) -> float:
    return tensor_bytes.sent_to_experts(options)[0]


def _sent_formula(config: Config, plan: ParallelLayout) -> float:
    return traffic(Shape.of(config, plan)).experts


def _peak(config: Config, plan: ParallelLayout) -> float:
    shape = Shape.of(config, plan)
    return max(rank_memory(shape, rank).total for rank in range(plan.layout.pp))
