"""Bytes that one device sends in one step, by kind of parallelism.

Ring algorithms: an all-reduce of X bytes over n ranks sends 2 (n-1)/n X, a gather or a reduce-scatter (n-1)/n X
(Patarasuk and Yuan, 2009). Traffic per layer: Narayanan et al., arXiv 2104.04473, section 3.2 (tensor, pipeline);
Rajbhandari et al., arXiv 1910.02054, section 7 (data); parallel/context_parallel.py (context).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .memory import GRADIENT, Bytes
from .shape import Shape


@dataclass(frozen=True)
class Traffic(Bytes):
    """Bytes sent by the busiest device in one step. tied: gradients of a tied weight between the ends of a pipeline.
    experts: rows sent to experts on other ranks, and their results."""

    tensor: float
    context: float
    pipeline: float
    data: float
    tied: float
    experts: float = 0.0


def traffic(shape: Shape) -> Traffic:
    """The traffic of the busiest rank."""
    c, plan = shape.config, shape.plan
    layers = _of_layers(shape, lambda layer: 1.0)
    forwards = 2 if c.recompute_granularity == "full" or c.recompute_layer_list else 1
    count = plan.microbatches
    tied = plan.layout.pp > 1 and not c.untie_embeddings_and_output_weights and plan.rank_of(plan.stages - 1) != 0
    table = shape.vocabulary * c.hidden_size
    pairs = _of_layers(shape, lambda layer: _parallel_pairs(shape, layer))
    return Traffic(
        tensor=count * ((forwards + 1) * pairs * _pair(shape) + _tensor_ends(shape))
        + count * layers * (forwards * _latents(shape, forward=True) + _latents(shape, forward=False))
        + gathered_again(shape)
        + layers * _latent_gradients(shape),
        context=count * layers * (forwards * context_forward(shape) + context_backward(shape)),
        pipeline=2.0 * count * _hops(shape) * shape.residual_bytes,
        data=_data(shape),
        tied=float(GRADIENT * table) if tied else 0.0,
        experts=count * _of_layers(shape, lambda layer: _experts(shape, layer, forwards)),
    )


def _of_layers(shape: Shape, per_layer: Callable[[int], float]) -> float:
    """The sum of a quantity over the layers of the pipeline rank where it is largest."""
    return max(
        sum(count * per_layer(layer) for layer, count in shape.kinds(shape.layers_of(rank)))
        for rank in range(shape.plan.layout.pp)
    )


def _parallel_pairs(shape: Shape, layer: int) -> int:
    """Pairs of a column- and a row-parallel linear layer: attention, and a dense MLP or a shared expert. Tokens reach
    experts on other tensor-parallel ranks through the dispatcher."""
    experts = shape.experts_of(layer)
    return 1 if experts is not None and not experts.shared else 2


def _experts(shape: Shape, layer: int, forwards: int) -> float:
    experts = shape.experts_of(layer)
    return 0.0 if experts is None else forwards * experts.sent_forward() + experts.sent_backward()


def _pair(shape: Shape) -> float:
    """A forward (or backward) pass of one microbatch through such a pair: an all-reduce of the hidden state, or with
    sequence parallelism a gather and a reduce-scatter, which send the same number of bytes."""
    whole = shape.rows * shape.config.micro_batch_size * shape.config.hidden_size * shape.element
    return 2 * (shape.tp - 1) / shape.tp * whole


def _latents(shape: Shape, *, forward: bool) -> float:
    """What a pass of one microbatch through latent attention sends more than `_pair` (negative: less). Its latents
    enter the region instead of a hidden state: an all-reduce of their gradients, or a gather in each forward pass and
    a scatter in the backward pass."""
    if shape.latent is None:
        return 0.0
    wider = shape.latent.entered() / shape.config.hidden_size - 1
    if shape.config.sequence_parallel:
        return wider * _pair(shape) / 2
    return 0.0 if forward else wider * _pair(shape)


def _latent_gradients(shape: Shape) -> float:
    """With sequence parallelism, the gradients of a layer's down projections are summed over the ranks in each step,
    each of which has those of its own rows."""
    if shape.latent is None or not shape.config.sequence_parallel:
        return 0.0
    return 2 * (shape.tp - 1) / shape.tp * GRADIENT * shape.latent.down


def gathered_again(shape: Shape) -> float:
    """With sequence parallelism, the backward pass gathers the inputs of column-parallel layers again for the weight
    gradients. This overlaps with the computation of the input gradients."""
    if not shape.config.sequence_parallel:
        return 0.0
    pairs = _of_layers(shape, lambda layer: _parallel_pairs(shape, layer))
    if shape.latent is not None:
        narrower = shape.latent.gathered_again() / shape.config.hidden_size - 1
        pairs += narrower * _of_layers(shape, lambda layer: 1.0)
    return shape.plan.microbatches * pairs * _pair(shape) / 2


def _tensor_ends(shape: Shape) -> float:
    """One all-reduce each in the embedding's forward and the output layer's backward pass."""
    return 2 * _pair(shape)


def context_forward(shape: Shape) -> float:
    """One layer's attention, forward: keys and values are sent round the ring; Ulysses exchanges heads."""
    c = shape.config
    per_channel = shape.rows * c.micro_batch_size * shape.element
    keys_and_values = c.key_copies * (shape.groups + shape.values)
    exchanged = (c.ulysses_degree - 1) / c.ulysses_degree * (shape.heads + keys_and_values + shape.context)
    return per_channel * (exchanged + (c.ring_degree - 1) * keys_and_values)


def context_backward(shape: Shape) -> float:
    """One layer's attention, backward: a ring also sends float32 gradients of keys and values, in one more step."""
    c = shape.config
    if c.ring_degree == 1:
        return context_forward(shape)
    keys_and_values = shape.rows * c.micro_batch_size * c.key_copies * (shape.groups + shape.values)
    return context_forward(shape) + c.ring_degree * keys_and_values * GRADIENT


def _hops(shape: Shape) -> int:
    """Forward sends of the busiest pipeline rank per microbatch; there are as many backward sends."""
    plan = shape.plan
    after = [(s, plan.rank_of(s)) for s in range(plan.stages - 1)]
    return max(sum(r == rank and plan.rank_of(s + 1) != r for s, r in after) for rank in range(plan.layout.pp))


def _data(shape: Shape) -> float:
    plan = shape.plan

    def sent(rank: int) -> float:
        """The gradients (and gathered weights) of experts and of everything else, each among their own replicas."""
        experts, layout = shape.expert_parameters(rank), plan.layout
        parts = ((shape.parameters(rank) - experts, layout.dp * layout.cp), (experts, layout.edp))
        return sum((n - 1) / n * count for count, n in parts)

    count = max(sent(r) for r in {0, plan.layout.pp - 1})
    if plan.zero == 0:
        return 2 * GRADIENT * count
    reductions = plan.microbatches if plan.zero >= 2 and plan.layout.pp == 1 else 1
    gathers = 2 * plan.microbatches if plan.zero == 3 else 1
    return count * (GRADIENT * reductions + shape.element * gathers)
