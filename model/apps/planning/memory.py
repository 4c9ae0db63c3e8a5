"""Peak memory of training, by category, on the device of a layout that needs the most memory.

Weights, gradients and optimizer follow Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3, with float32 gradients
(16 bits in a single process whose step is one bfloat16 microbatch). Activations are those of activations.py for every
microbatch in flight (schedules.py). `hal bench scaling` verifies the trainer against these formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ...config.parallel_layout import ParallelLayout, sums_in_place
from ...config.schema import Config
from .activations import head_bytes, recomputed_at_once, stage_bytes
from .communicators import communicators
from .schedules import fullest
from .shape import Shape

MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes per parameter: float32 master copy, Adam's two moments, float32 gradient sum."""


@dataclass(frozen=True)
class Bytes:
    """Numbers of bytes by what they are for."""

    @property
    def total(self) -> float:
        """Their sum."""
        total: float = sum(getattr(self, f.name) for f in fields(self))
        return total


@dataclass(frozen=True)
class Memory(Bytes):
    """Bytes on one device when it uses the most. weights: the copies used for computing. buffers: receive buffers of
    the pipeline, or send buffers of the gradient reduction, and those of communicators. working: temporary memory of
    one layer's backward pass."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    working: float


def memory(c: Config, plan: ParallelLayout, imbalance: float = 1.0, communicator: float = 0.0) -> Memory:
    """The memory of the pipeline rank that needs the most. imbalance: as in Shape.of. communicator: bytes that each
    communicator keeps on a device, beside the tensors."""
    shape, pp = Shape.of(c, plan, imbalance), plan.layout.pp
    # With equal stages, the ranks between the second and the last have fewer microbatches in flight than the second.
    unequal = c.num_layer_list or (c.num_experts is not None and c.moe_layer_freq != "1")
    ranks = range(pp) if unequal else sorted({0, min(1, pp - 1), pp - 1})
    largest = max((rank_memory(shape, rank) for rank in ranks), key=lambda m: m.total)
    return (
        replace(largest, buffers=largest.buffers + communicator * communicators(c, plan)) if communicator else largest
    )


def rank_memory(shape: Shape, rank: int) -> Memory:
    """The peak of pipeline rank `rank`: during a backward pass, or while gradients are reduced."""
    plan, stages = shape.plan, shape.plan.stages_of(rank)
    weights, gradients, optimizer = _in_a_step(shape, rank)
    peaks = fullest(plan.schedule, plan.layout.pp, len(stages), plan.microbatches, rank)
    kept = {s: stage_bytes(shape, s) for s in stages}
    activations = max(sum(kept[s] * count for s, count in peak.items()) for peak in peaks)
    working = max(_working(shape, s) for s in stages)
    buffers = _pipeline_buffers(shape, stages)
    reducing = GRADIENT * _replicated(shape, rank)
    if plan.zero == 0 and reducing > activations + working:
        # The peak is after the last backward pass, when all buckets are reduced concurrently.
        return Memory(weights, gradients, optimizer, 0, buffers + reducing, 0)
    embedding = _embedding_gradient(shape, stages)
    if embedding > activations + working:
        return Memory(weights, gradients, optimizer, 0, buffers, embedding)
    return Memory(weights, gradients, optimizer, activations, buffers, working)


def _replicated(shape: Shape, rank: int) -> int:
    """Parameters of a pipeline rank whose gradients are summed with those of other ranks; experts have replicas of
    their own, and often none."""
    experts, layout = shape.expert_parameters(rank), shape.plan.layout
    others = (shape.parameters(rank) - experts) * (layout.dp * layout.cp > 1)
    return others + experts * (layout.edp > 1)


def states(shape: Shape, rank: int) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer between the last backward pass and the optimizer step."""
    count, low = shape.parameters(rank), shape.element < MASTER
    if shape.plan.zero == 0:
        optimizer = (MOMENTS + MASTER * low) * count
        alone = shape.plan.layout.world == 1 and shape.plan.microbatches == 1 and not shape.config.fp16
        gradient = shape.element if alone else GRADIENT  # a single microbatch's gradient is not summed in float32
        return {"weights": shape.element * count, "gradients": gradient * count, "optimizer": optimizer}
    shard = shape.shard(rank)
    return {"weights": MASTER * shard, "gradients": GRADIENT * shard, "optimizer": MOMENTS * shard}


def _in_a_step(shape: Shape, rank: int) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) of a rank during a backward pass. In 16 bits, the optimizer's share includes the
    sharded float32 weights, and `weights` are the gathered 16-bit ones."""
    plan, count, element = shape.plan, shape.parameters(rank), shape.element
    low = element < MASTER
    if plan.zero == 0:
        parts = states(shape, rank)
        return parts["weights"], parts["gradients"], parts["optimizer"]
    shard = shape.shard(rank)
    gathered: float = count
    if plan.zero == 3:
        # Embedding and head stay gathered during a pass; of the layers, only the current and the prefetched one are.
        stages = plan.stages_of(rank)
        sizes = [[shape.layer_parameters(layer) for layer in plan.layers[s]] for s in stages]
        pairs = [sum(pair) for of_stage in sizes for pair in zip(of_stage, [*of_stage[1:], 0])]
        gathered = max(pairs, default=0) + sum(shape.end_parameters(s) for s in stages)
    weights = element * gathered + (0 if low else MASTER * shard)
    # Gradients are summed unsharded, unless every microbatch is reduced. A pipeline reduces after the last microbatch.
    whole = plan.microbatches > 1 and (plan.zero == 1 or plan.layout.pp > 1)
    return weights, GRADIENT * (count if whole else shard), (MOMENTS + MASTER * low) * shard


def _pipeline_buffers(shape: Shape, stages: list[int]) -> float:
    """torch's stages allocate a receive buffer per microbatch for hidden states and for gradients. With several stages
    per rank, sent tensors are also kept until the end of the step."""
    plan = shape.plan
    if plan.layout.pp == 1:
        return 0.0
    inputs = [s for s in stages if not shape.first(s)]
    outputs = [s for s in stages if not shape.last(s)]
    count = len(inputs) + len(outputs)
    if len(stages) > 1:
        # A stage on the same rank gets its input without a message.
        count += sum(s - 1 not in stages for s in inputs) + sum(s + 1 not in stages for s in outputs)
    if plan.schedule == "zbv":
        # Its backward pass leaves a `grad` on every receive buffer of hidden states.
        count += sum(s - 1 not in stages for s in inputs)
    return float(plan.microbatches * count * shape.residual_bytes)


def _embedding_gradient(shape: Shape, stages: list[int]) -> float:
    """Memory at the end of a backward pass, when the layers have freed their activations: the gradient of the full
    table in float32, and a second gradient: a copy rounded to 16 bits, or that of the output layer if it is tied."""
    whole = not shape.plan.zero and any(shape.first(s) for s in stages)
    tied = not shape.config.untie_embeddings_and_output_weights and any(shape.last(s) for s in stages)
    other = shape.element if shape.element < MASTER or tied else 0
    return float(whole * shape.vocabulary * shape.config.hidden_size * (MASTER + other))


def _working(shape: Shape, stage: int) -> float:
    """Temporary memory of one layer's backward pass: gradients of its widest activations, the gradient of the largest
    weight before it is accumulated (unless linear layers accumulate in place), and recomputed activations."""
    c, in_place = shape.config, sums_in_place(shape.config, shape.plan)
    rows, h = shape.rows * c.micro_batch_size * shape.element, c.hidden_size
    # Results of all-reduce and all-gather are allocated in addition to their inputs.
    moved = h * (5 if c.sequence_parallel else 3 if shape.tp > 1 else 1)
    layers = [0.0]
    for n, _ in shape.kinds(shape.plan.layers[stage]):
        experts, inner = shape.experts_of(n), shape.gate * shape.ffn
        if experts is None:
            gradients, largest = float(rows * (inner + shape.ffn + moved)), h * inner
        else:
            gradients, largest = rows * moved + experts.working(), experts.local * h * shape.gate * experts.ffn
        if shape.latent is not None:  # whose heads may together be wider than an MLP
            gradients = max(gradients, rows * moved + shape.latent.working())
        weight = 0.0 if in_place else largest * shape.element
        if shape.plan.zero >= 2:  # one layer's gradients unsharded, and their send buffer
            weight = shape.layer_parameters(n) * (shape.element + GRADIENT)
        layers.append(gradients + weight)
    layer = max(layers) + recomputed_at_once(shape, stage)
    if not shape.last(stage):
        return float(layer)
    # The layers' backward pass starts after the head has freed its activations. The loss writes its gradient into the
    # logits, so that the head needs no buffer for it.
    head = rows * moved + (0 if in_place else shape.vocabulary * h * shape.element)
    return float(max(head, layer - head_bytes(shape)))


def explain(m: Memory) -> str:
    """The categories in GiB, largest first."""
    parts = sorted(((getattr(m, f.name), f.name) for f in fields(m)), reverse=True)
    return ", ".join(f"{name} {gib(size):.1f}" for size, name in parts if size > 0)


def gib(size: float) -> float:
    """Bytes in GiB."""
    return size / 2**30
