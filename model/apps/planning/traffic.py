"""Bytes that one device sends in one step, by kind of parallelism.

Ring algorithms: an all-reduce of X bytes over n ranks sends 2 (n-1)/n X, a gather or a reduce-scatter (n-1)/n X
(Patarasuk and Yuan, 2009). Traffic per layer: Narayanan et al., arXiv 2104.04473, section 3.2 (tensor, pipeline);
Rajbhandari et al., arXiv 1910.02054, section 7 (data); parallel/context_parallel.py (context).
"""

from __future__ import annotations

from dataclasses import dataclass

from .memory import GRADIENT, Bytes
from .shape import Shape


@dataclass(frozen=True)
class Traffic(Bytes):
    """Bytes sent by the busiest device in one step. tied: gradients of a tied weight between the ends of a pipeline."""

    tensor: float
    context: float
    pipeline: float
    data: float
    tied: float


def traffic(shape: Shape) -> Traffic:
    """The traffic of the busiest rank."""
    c, plan = shape.config, shape.plan
    ranks = range(plan.layout.pp)
    layers = max(sum(len(plan.layers[s]) for s in plan.stages_of(r)) for r in ranks)
    forwards = 2 if c.recompute_granularity == "full" else 1
    count = plan.microbatches
    tied = plan.layout.pp > 1 and not c.untie_embeddings_and_output_weights and plan.rank_of(plan.stages - 1) != 0
    table = shape.vocabulary * c.hidden_size
    return Traffic(
        tensor=count * (layers * (forwards + 1) * tensor_per_pass(shape) + _tensor_ends(shape)) + gathered_again(shape),
        context=count * layers * (forwards * context_forward(shape) + context_backward(shape)),
        pipeline=2.0 * count * _hops(shape) * shape.hidden_bytes,
        data=_data(shape),
        tied=float(GRADIENT * table) if tied else 0.0,
    )


def tensor_per_pass(shape: Shape) -> float:
    """One layer's forward (or backward) pass of one microbatch: two all-reduces of the hidden state, or with sequence
    parallelism two gathers and two reduce-scatters, which send the same number of bytes."""
    whole = shape.rows * shape.config.micro_batch_size * shape.config.hidden_size * shape.element
    return 2 * 2 * (shape.tp - 1) / shape.tp * whole


def gathered_again(shape: Shape) -> float:
    """With sequence parallelism, the backward pass gathers the inputs of column-parallel layers again for the weight
    gradients, twice per layer. This overlaps with the computation of the input gradients."""
    plan = shape.plan
    layers = max(sum(len(plan.layers[s]) for s in plan.stages_of(r)) for r in range(plan.layout.pp))
    return plan.microbatches * layers * tensor_per_pass(shape) / 2 if shape.config.sequence_parallel else 0.0


def _tensor_ends(shape: Shape) -> float:
    """One all-reduce each in the embedding's forward and the output layer's backward pass."""
    return tensor_per_pass(shape)


def context_forward(shape: Shape) -> float:
    """One layer's attention, forward: keys and values are sent round the ring; Ulysses exchanges heads."""
    c, cp = shape.config, shape.plan.layout.cp
    per_channel = shape.rows * c.micro_batch_size * shape.element
    if c.context_parallel_algo == "ulysses":
        return (cp - 1) / cp * per_channel * 2 * (shape.heads + shape.groups)
    return (cp - 1) * per_channel * 2 * shape.groups


def context_backward(shape: Shape) -> float:
    """One layer's attention, backward: a ring also sends float32 gradients of keys and values, in one more step."""
    if shape.config.context_parallel_algo == "ulysses" or shape.plan.layout.cp == 1:
        return context_forward(shape)
    per_channel = shape.rows * shape.config.micro_batch_size
    return context_forward(shape) + shape.plan.layout.cp * per_channel * 2 * shape.groups * GRADIENT


def _hops(shape: Shape) -> int:
    """Forward sends of the busiest pipeline rank per microbatch; there are as many backward sends."""
    plan = shape.plan
    after = [(s, plan.rank_of(s)) for s in range(plan.stages - 1)]
    return max(sum(r == rank and plan.rank_of(s + 1) != r for s, r in after) for rank in range(plan.layout.pp))


def _data(shape: Shape) -> float:
    plan = shape.plan
    n = plan.layout.dp * plan.layout.cp
    count = max(shape.parameters(r) for r in {0, plan.layout.pp - 1})
    share = (n - 1) / n
    if plan.zero == 0:
        return 2 * share * GRADIENT * count
    reductions = plan.microbatches if plan.zero >= 2 and plan.layout.pp == 1 else 1
    gathers = 2 * plan.microbatches if plan.zero == 3 else 1
    return share * count * (GRADIENT * reductions + shape.element * gathers)
