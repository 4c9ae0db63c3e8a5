"""The options of a mixture of experts: which layers have experts, the auxiliary losses, and what contradicts what."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schema import Config

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
"""Values of --moe-router-load-balancing-type."""

OPTIONS = (
    "moe_layer_freq moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff "
    "moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_dtype "
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_expert_capacity_factor "
    "moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dispatcher_type moe_per_layer_logging"
)
"""Names of the options that only a model with experts reads."""


@functools.lru_cache
def layer_pattern(frequency: str, layers: int, *, last: bool = False) -> tuple[bool, ...]:
    """Which of `layers` layers an option such as Megatron's --moe-layer-freq means: N for every N-th layer from the
    first on, or with `last` the last of each N; or a list of 0 and 1 as an expression such as ([0]*1+[1]*2)*3. Raises
    ValueError for anything else."""
    text = frequency.strip()
    if layers > 1_000_000:  # of a damaged checkpoint: a pattern of as many would fill the memory
        raise ValueError(f"{layers} layers are too many for a pattern")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return tuple((n + last) % int(text) == 0 for n in range(layers))
    try:
        pattern = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        pattern = None
    if not isinstance(pattern, list):
        raise ValueError(f"{frequency!r} is neither a positive integer nor a list of 0 and 1 such as [0]+[1]*3")
    if len(pattern) != layers:
        raise ValueError(f"{frequency!r} describes {len(pattern)} layers, but --num-layers is {layers}")
    return tuple(map(bool, pattern))


def _evaluated(node: ast.expr) -> list[int] | int | None:
    """The list or integer that an expression of lists, + and * stands for; None if it is something else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        values = [_evaluated(element) for element in node.elts]
        return [v for v in values if isinstance(v, int)] if all(v in (0, 1) for v in values) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        a, b = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add):
            return a + b if isinstance(a, list) and isinstance(b, list) else None
        if isinstance(a, int):
            a, b = b, a
        # The limit keeps an expression of a few characters from filling the memory.
        if isinstance(a, list) and isinstance(b, int) and len(a) * b <= 100_000:
            return a * b
    return None


def coefficients(c: Config) -> dict[str, float]:
    """The load-balancing losses that have an effect, with their coefficients. Raises ValueError for texts that are no
    numbers, or a number of coefficients that does not match the number of losses."""
    kinds, values = c.moe_router_load_balancing_type, [float(v) for v in c.moe_aux_loss_coeff]
    if len(values) != len(kinds):
        raise ValueError(f"{len(values)} coefficients for {len(kinds)} losses")
    return {kind: value for kind, value in zip(kinds, values) if value != 0.0 and kind != "none"}


def problems(c: Config) -> Iterator[str]:
    """The problems with the options of experts, one line each."""
    if c.num_experts is None:
        if c.expert_model_parallel_size > 1:
            yield "--expert-model-parallel-size shards experts over ranks; it needs --num-experts"
        return
    if c.mlp_bias:
        without = "cannot have --add-mlp-bias" if c.add_mlp_bias else "needs --disable-bias-linear"
        yield f"--num-experts {without}: experts have no biases"
    try:
        layer_pattern(c.moe_layer_freq, c.num_layers)
    except ValueError as error:
        yield f"--moe-layer-freq {error}"
    yield from _routing(c, c.num_experts)
    yield from _losses(c)
    if c.moe_pad_expert_input_to_capacity and c.moe_expert_capacity_factor is None:
        yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"
    yield from _sharding(c, c.num_experts)


def _routing(c: Config, experts: int) -> Iterator[str]:
    topk, groups, chosen = c.moe_router_topk, c.moe_router_num_groups, c.moe_router_group_topk
    sinkhorn = "sinkhorn" in c.moe_router_load_balancing_type
    if topk > experts:
        yield f"--moe-router-topk {topk} exceeds --num-experts {experts}"
    if c.moe_router_score_function == "softmax" and topk == 1 and not (c.moe_router_pre_softmax or sinkhorn):
        yield "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax of a single logit is always 1"
    if groups is None and chosen is not None:
        yield "--moe-router-group-topk needs --moe-router-num-groups"
    elif groups is not None and chosen is not None:
        if sinkhorn:
            yield "--moe-router-num-groups cannot be combined with --moe-router-load-balancing-type sinkhorn"
        if experts % groups:
            yield f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}"
        elif chosen > groups or topk % chosen or topk // chosen > experts // groups:
            yield (
                f"--moe-router-group-topk {chosen} must be at most {groups} groups and divide --moe-router-topk {topk} "
                f"into shares of at most the {experts // groups} experts of a group"
            )
    if c.moe_router_enable_expert_bias and (c.moe_router_score_function != "sigmoid" or sinkhorn):
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, and not sinkhorn"


def _losses(c: Config) -> Iterator[str]:
    kinds, texts = c.moe_router_load_balancing_type, c.moe_aux_loss_coeff
    unknown = [kind for kind in kinds if kind not in BALANCING]
    if unknown or len(set(kinds)) != len(kinds):
        yield f"--moe-router-load-balancing-type {' '.join(kinds)} must be one or several of {', '.join(BALANCING)}"
        return
    alone = [kind for kind in kinds if kind in ("sinkhorn", "none")]
    if alone and len(kinds) > 1:
        yield f"--moe-router-load-balancing-type {alone[0]} cannot be combined with others"
        return
    try:
        given = coefficients(c)
    except ValueError:
        yield f"--moe-aux-loss-coeff {' '.join(texts)} must be one number for each of {', '.join(kinds)}"
        return
    if not all(math.isfinite(value) and value >= 0.0 for value in given.values()):
        yield f"--moe-aux-loss-coeff {' '.join(texts)} must be >= 0"
    if alone and given:
        yield "--moe-router-load-balancing-type sinkhorn has no auxiliary loss; remove --moe-aux-loss-coeff"
    if given.get("global_aux_loss") and c.recompute_granularity == "full":
        yield (
            "--moe-router-load-balancing-type global_aux_loss averages over the microbatches before, which "
            "--recompute-granularity full would count twice; use aux_loss or seq_aux_loss, or recompute selectively"
        )


def _sharding(c: Config, experts: int) -> Iterator[str]:
    ep, etp, tp = c.expert_model_parallel_size, c.expert_tensor_parallel_size, c.tensor_model_parallel_size
    if experts % ep:
        yield f"--num-experts {experts} is not divisible by --expert-model-parallel-size {ep}"
    if c.moe_ffn_hidden_size % etp:
        yield f"--moe-ffn-hidden-size {c.moe_ffn_hidden_size} is not divisible by --expert-tensor-parallel-size {etp}"
    if (c.moe_shared_expert_intermediate_size or 0) % tp:
        yield (
            f"--moe-shared-expert-intermediate-size {c.moe_shared_expert_intermediate_size} is not divisible by "
            f"--tensor-model-parallel-size {tp}"
        )


def training_problems(c: Config) -> Iterator[str]:
    """What only training with experts needs."""
    if c.num_experts is not None and c.tensor_model_parallel_size > 1 and not c.sequence_parallel:
        yield (
            "--num-experts with --tensor-model-parallel-size needs --sequence-parallel, so that the tensor-parallel "
            "ranks route different tokens"
        )
