"""Estimates the time of a step: matrix products at a fraction of peak FLOP/s, other operations at memory bandwidth,
traffic at link bandwidth, plus the pipeline bubble.

The estimate is for comparing layouts; it is not a measurement. The three efficiencies below were fitted once to
published A100 runs of Megatron (docs/scaling.md lists the errors), and are the same for every accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass

from hal import DeviceSpec, HalError

from ...config.flops import flops_per_token, visible_pairs
from ...config.recomputation import counts
from .schedules import bubble_formula
from .shape import Shape
from .traffic import gathered_again, traffic

PRODUCTS, MEMORY, LINKS = 0.72, 0.75, 0.75
"""Fractions of peak FLOP/s, memory bandwidth and link bandwidth that a training step reaches."""
OPTIMIZER = 4 * 7 + 2
"""Bytes per parameter that AdamW moves: it reads the float32 weight, gradient and two moments, and writes the weight,
the moments and a 16-bit copy of the weight."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step and its parts. experts: the exchange of their rows. mfu: model FLOP/s / peak; bubble: idle
    time / working time."""

    seconds: float
    compute: float
    tensor: float
    context: float
    experts: float
    pipeline: float
    data: float
    optimizer: float
    bubble: float
    tokens_per_second: float
    mfu: float


def estimate(shape: Shape, device: DeviceSpec) -> Estimate:
    """One step of a layout on `device`s. Raises HalError if the peak for the config's dtype is unknown."""
    c, plan = shape.config, shape.plan
    layout, count = plan.layout, plan.microbatches
    peak = peak_flops(shape, device)
    bubble = bubble_formula(plan.schedule, layout.pp, plan.stages // layout.pp, count)
    ranks = range(layout.pp)
    compute = count * max(_microbatch(shape, device, peak, r) for r in ranks)
    sent, links = traffic(shape), _Links(device)
    tensor = (sent.tensor - gathered_again(shape)) / links.rate(1, layout.tp)
    context = sent.context / links.rate(layout.tp, layout.cp)
    experts = sent.experts / links.rate(1, layout.etp * layout.ep)
    # Pipeline neighbours communicate in pairs, and so do the first and the last stage for a tied weight.
    pair = links.rate(layout.world // layout.pp, 2)
    pipeline, tied = sent.pipeline / pair, sent.tied / pair
    data = sent.data / links.rate(layout.tp, layout.cp * layout.dp) + tied
    hidden = 0.0
    if plan.zero or c.overlap_grad_reduce:
        # The traffic overlaps with the last microbatch's passes, or with those of all microbatches if each is reduced.
        hidden = compute if plan.zero >= 2 and layout.pp == 1 else compute / count
    data = max(0.0, data - hidden)
    updated = shape.shard(0) if plan.zero else shape.parameters(0)
    optimizer = OPTIMIZER * updated / (MEMORY * device.memory_bandwidth)
    seconds = (compute + tensor + context + experts + pipeline) * (1 + bubble) + data + optimizer
    tokens = c.global_batch_size * c.seq_length / seconds
    mfu = tokens * flops_per_token(c) / (layout.world * peak)
    return Estimate(seconds, compute, tensor, context, experts, pipeline, data, optimizer, bubble, tokens, mfu)


def peak_flops(shape: Shape, device: DeviceSpec) -> float:
    """The device's peak in the config's dtype, FLOP/s."""
    c = shape.config
    dtype = "bf16" if c.bf16 else "fp16" if c.fp16 else "fp32"
    if dtype not in device.flops:
        known = ", ".join(device.flops)
        raise HalError(
            f"the {dtype} peak of {device.name} is unknown, only {known}; add --bf16, or give --device-flops"
        )
    return device.flops[dtype]


class _Links:
    """Bytes per second between the ranks of a group, by their distance; a machine has consecutive ranks."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def rate(self, stride: int, size: int) -> float:
        """The rate of a ring of `size` ranks, `stride` apart. Members on one machine share its network."""
        d = self.device
        if stride * size <= d.per_node:
            return LINKS * d.node_link
        return LINKS * min(d.node_link, d.network * max(1, d.per_node // stride))


def _microbatch(shape: Shape, device: DeviceSpec, peak: float, rank: int) -> float:
    """Compute time of pipeline rank `rank` for both passes of one microbatch, in seconds."""
    stages = shape.plan.stages_of(rank)
    flops, moved = 0.0, 0.0
    for layer, count in shape.kinds(shape.layers_of(rank)):
        of_layer = _layer(shape, layer)
        flops, moved = flops + count * of_layer[0], moved + count * of_layer[1]
    if any(shape.last(s) for s in stages):
        logits = shape.rows * shape.config.micro_batch_size * shape.vocabulary
        flops += 3 * 2 * logits * shape.config.hidden_size
        moved += 5 * logits * shape.element
    return flops / (PRODUCTS * peak) + moved / (MEMORY * device.memory_bandwidth)


def _layer(shape: Shape, layer: int) -> tuple[float, float]:
    """(FLOP of products, bytes moved by other operations) of a layer and microbatch, with recomputation."""
    c, experts = shape.config, shape.experts_of(layer)
    tokens = shape.rows * c.micro_batch_size
    qkv, inner = shape.heads + shape.groups + shape.values, shape.gate * shape.ffn
    latent = shape.latent
    products = 2.0 * tokens * c.hidden_size * (qkv + shape.context) if latent is None else latent.products()
    if experts is None:
        products += 2.0 * tokens * c.hidden_size * (inner + shape.ffn)
        moved: float = tokens * shape.element * (inner + shape.ffn)
    else:
        products += experts.products()
        moved = experts.moved()
    pairs = visible_pairs(c.seq_length, *c.window_of(layer)) / c.seq_length
    scores = 2.0 * tokens * (shape.heads + shape.context) * pairs
    # Two norms and two additions of hidden states; copies or rotations of q, k and v; the activation.
    moved += 10 * shape.hidden_bytes + tokens * shape.element * 2 * qkv + (0 if latent is None else latent.moved())
    inside = 0.0
    if not c.use_flash_attn:
        scores *= c.seq_length / pairs  # masked pairs are multiplied too
        inside = 6.0 * tokens * c.seq_length * (c.num_attention_heads // shape.tp) * shape.element
    full, attention = _recomputed_fractions(shape)
    passes = 3 + full
    # A ring's backward pass computes attention twice (ADR 0005); selective recomputation computes it once more.
    ring = 2 if c.ring_degree > 1 else 0
    attention_passes = passes + ring + attention
    return passes * products + attention_passes * scores, passes * moved + attention_passes * inside


def _recomputed_fractions(shape: Shape) -> tuple[float, float]:
    """The fractions of layers that are recomputed as a whole, and of those whose attention is, on the longest stage."""
    layers, stage = max((len(layers), stage) for stage, layers in enumerate(shape.plan.layers))
    full, attention = counts(shape.config, stage, layers)
    return full / max(1, layers), attention / max(1, layers)
