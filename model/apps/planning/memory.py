"""Bytes that training holds on the fullest device of a layout, by kind, and how they come about.

Weights, gradients and optimizer follow Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3, with float32 gradients
(16 bits in a single process whose step is one bfloat16 microbatch); activations are those of activations.py for every
microbatch in flight (schedules.py). The trainer is measured against this by `hal bench scaling`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..config import Config
from ..parallel.plan import Plan, sums_in_place
from .activations import head_bytes, recomputed_at_once, stage_bytes
from .schedules import fullest
from .shape import Shape

MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes per parameter: float32 copy, Adam's two moments, float32 sum of gradients."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. weights: what the model computes with. buffers: what the pipeline receives into, or what
    the gradient reduction sends from. working: what one layer's backward pass needs besides what was kept."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    working: float

    @property
    def total(self) -> float:
        """All of it, at the moment when most is held."""
        return sum(getattr(self, f.name) for f in fields(self))


def memory(c: Config, plan: Plan) -> Memory:
    """What the fullest pipeline rank holds."""
    shape, pp = Shape.of(c, plan), plan.layout.pp
    # Between the first two and the last rank an even split only repeats itself with less in flight.
    ranks = range(pp) if c.num_layer_list else sorted({0, min(1, pp - 1), pp - 1})
    return max((rank_memory(shape, rank) for rank in ranks), key=lambda m: m.total)


def rank_memory(shape: Shape, rank: int) -> Memory:
    """What pipeline rank `rank` holds when it holds most: in a backward pass, or while gradients are reduced."""
    plan, stages = shape.plan, shape.plan.stages_of(rank)
    weights, gradients, optimizer = _in_a_step(shape, rank)
    moments = fullest(plan.schedule, plan.layout.pp, len(stages), plan.microbatches, rank)
    kept = {s: stage_bytes(shape, s) for s in stages}
    activations = max(sum(kept[s] * count for s, count in held.items()) for held in moments)
    working = max(_working(shape, s) for s in stages)
    buffers = _pipeline_buffers(shape, stages)
    if plan.zero == 0 and plan.layout.dp * plan.layout.cp > 1:
        reducing = GRADIENT * shape.parameters(rank)
        if reducing > activations + working:
            # The fullest moment is after the last backward pass: every bucket is on its way at once.
            return Memory(weights, gradients, optimizer, 0, buffers + reducing, 0)
    ending = _embedding_gradient(shape, stages)
    if ending > activations + working:
        return Memory(weights, gradients, optimizer, 0, buffers, ending)
    return Memory(weights, gradients, optimizer, activations, buffers, working)


def states(shape: Shape, rank: int) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer when a backward pass is done and its step is not."""
    count, low = shape.parameters(rank), shape.element < MASTER
    if shape.plan.zero == 0:
        optimizer = (MOMENTS + MASTER * low) * count
        alone = shape.plan.layout.world == 1 and shape.plan.microbatches == 1 and not shape.config.fp16
        gradient = shape.element if alone else GRADIENT  # what nothing is added to stays as it is
        return {"weights": shape.element * count, "gradients": gradient * count, "optimizer": optimizer}
    shard = count / (shape.plan.layout.dp * shape.plan.layout.cp)
    return {"weights": MASTER * shard, "gradients": GRADIENT * shard, "optimizer": MOMENTS * shard}


def _in_a_step(shape: Shape, rank: int) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) of a rank in the midst of a backward pass. Sharded weights are the optimizer's
    float32 copy, if the model computes with others."""
    plan, count, element = shape.plan, shape.parameters(rank), shape.element
    low = element < MASTER
    if plan.zero == 0:
        held = states(shape, rank)
        return held["weights"], held["gradients"], held["optimizer"]
    shard = count / (plan.layout.dp * plan.layout.cp)
    gathered: float = count
    if plan.zero == 3:
        # The ends of the model stay gathered for a whole pass; of the layers, one and the next.
        stages = plan.stages_of(rank)
        layers = min(2, max(len(plan.layers[s]) for s in stages))
        gathered = layers * shape.layer_parameters() + sum(shape.end_parameters(s) for s in stages)
    weights = element * gathered + (0 if low else MASTER * shard)
    # Summed whole over the microbatches, unless every microbatch is reduced; a pipeline reduces after the last.
    whole = plan.microbatches > 1 and (plan.zero == 1 or plan.layout.pp > 1)
    return weights, GRADIENT * (count if whole else shard), (MOMENTS + MASTER * low) * shard


def _pipeline_buffers(shape: Shape, stages: list[int]) -> float:
    """torch's stages have a buffer per microbatch for every hidden state and every gradient they receive; with several
    stages per rank, what they send stays until the step is over."""
    plan = shape.plan
    if plan.layout.pp == 1:
        return 0.0
    inputs = [s for s in stages if not shape.first(s)]
    outputs = [s for s in stages if not shape.last(s)]
    count = len(inputs) + len(outputs)
    if len(stages) > 1:
        # A neighbour on the same rank is handed its input.
        count += sum(s - 1 not in stages for s in inputs) + sum(s + 1 not in stages for s in outputs)
    if plan.schedule == "zbv":
        # Its backward pass leaves a gradient with every buffer that another rank has filled.
        count += sum(s - 1 not in stages for s in inputs)
    return float(plan.microbatches * count * shape.hidden_bytes)


def _embedding_gradient(shape: Shape, stages: list[int]) -> float:
    """What the end of a backward pass needs, when the layers have given back all they kept: the gradient of the whole
    table, summed in float32, and beside it that gradient rounded or, of a tied one, added to the output layer's."""
    if shape.plan.zero or not any(shape.first(s) for s in stages):
        return 0.0
    tied = not shape.config.untie_embeddings_and_output_weights and any(shape.last(s) for s in stages)
    other = shape.element if shape.element < MASTER or tied else 0
    return float(shape.vocabulary * shape.config.hidden_size * (MASTER + other))


def _working(shape: Shape, stage: int) -> float:
    """Gradients of the widest activations of one layer; the gradient of the largest weight before it is added to the
    others, unless products add to the sums themselves; and what recomputation brings back."""
    c, added = shape.config, sums_in_place(shape.config, shape.plan)
    rows = shape.rows * c.micro_batch_size * shape.element
    h, inner = c.hidden_size, shape.gate * shape.ffn
    # Sums and gathers over ranks are made beside what they are made of.
    moved = h * (5 if c.sequence_parallel else 3 if shape.tp > 1 else 1)
    weight = 0.0 if added else h * inner * shape.element
    if shape.plan.zero >= 2:  # one layer's gradients are whole until they are reduced, and once more as they are sent
        weight = shape.layer_parameters() * (shape.element + GRADIENT)
    layer = rows * (inner + shape.ffn + moved) + recomputed_at_once(shape, stage) + weight
    if not shape.last(stage):
        return float(layer)
    # The layers begin when the head has given back what it kept.
    # The loss writes its gradient over the logits.
    head = rows * moved + (0 if added else shape.vocabulary * h * shape.element)
    return float(max(head, layer - head_bytes(shape)))


def explain(m: Memory) -> str:
    """The kinds, largest first, in GiB."""
    parts = sorted(((getattr(m, f.name), f.name) for f in fields(m)), reverse=True)
    return ", ".join(f"{name} {gib(size):.1f}" for size, name in parts if size > 0)


def gib(size: float) -> float:
    """Bytes in GiB."""
    return size / 2**30
