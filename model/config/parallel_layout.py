"""The distribution of a run over ranks, decided and validated before anything starts.

`make_parallel_layout` turns a configuration and a world size into a `ParallelLayout`, or raises a ConfigError that says
what is wrong and what to change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hal import ContractError
from hal.mesh import Layout

from .sample_schedule import batch_sizes, valid_batches
from .schema import Config, ConfigError, report


@dataclass(frozen=True)
class ParallelLayout:
    """layout: sizes of the dimensions. schedule: none, 1f1b, interleaved or zbv. layers: the layers of each stage, by
    stage number. microbatches: per replica and step. zero: 0 replicated, 1 optimizer state sharded over the
    data-parallel ranks, 2 also gradients, 3 also parameters."""

    layout: Layout
    schedule: str
    layers: tuple[tuple[int, ...], ...]
    microbatches: int
    zero: int

    @property
    def stages(self) -> int:
        """The number of pipeline stages; a rank may hold several."""
        return len(self.layers)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage: stages are dealt round-robin, or in a V shape for zbv."""
        pp = self.layout.pp
        return 2 * pp - 1 - stage if self.schedule == "zbv" and stage >= pp else stage % pp

    def stages_of(self, pp_rank: int) -> list[int]:
        """The stages of a pipeline rank, ascending."""
        return [s for s in range(self.stages) if self.rank_of(s) == pp_rank]


def sums_in_place(c: Config, plan: ParallelLayout) -> bool:
    """Whether linear layers accumulate weight gradients into `main_grad` themselves (Optimizer.sum_in_place).

    Sharding, zero bubble and overlapped reduction need every gradient from autograd, and torch's pipeline schedules
    interleave the passes of the microbatches.
    """
    overlapped = c.overlap_grad_reduce and plan.layout.dp * plan.layout.cp > 1
    return plan.layout.pp == 1 and plan.zero == 0 and not overlapped


def zero_stage(c: Config) -> int:
    """The ZeRO stage that --zero-stage or Megatron's --use-distributed-optimizer (stage 1) selects."""
    return c.zero_stage or int(c.use_distributed_optimizer)


def make_parallel_layout(c: Config, world: int) -> ParallelLayout:
    """The layout of a config on `world` ranks. Raises ConfigError."""
    errors = [ConfigError(problem) for problem in problems(c, world)]
    if errors:
        raise report(errors)
    layout = _layout(c, world)
    schedule = "none" if layout.pp == 1 else c.pipeline_schedule
    if len(layers_of_stages(c)) > layout.pp and schedule != "zbv":
        schedule = "interleaved"
    return ParallelLayout(layout, schedule, layers_of_stages(c), _microbatches(c, layout), zero_stage(c))


def _layout(c: Config, world: int) -> Layout:
    tp, cp, pp = c.tensor_model_parallel_size, c.context_parallel_size, c.pipeline_model_parallel_size
    if c.num_experts is None:
        return Layout.of_world(world, tp=tp, cp=cp, pp=pp)
    ep, etp = c.expert_model_parallel_size, c.expert_tensor_parallel_size
    return Layout.of_world(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def ranks_of_replica(c: Config) -> int:
    """The smallest number of ranks that can train this config."""
    ranks = c.tensor_model_parallel_size * c.context_parallel_size
    if c.num_experts is not None:
        ranks = math.lcm(ranks, c.expert_model_parallel_size * c.expert_tensor_parallel_size)
    return ranks * c.pipeline_model_parallel_size


def _microbatches(c: Config, layout: Layout) -> int:
    """Microbatches per step and replica."""
    return c.global_batch_size // (c.micro_batch_size * layout.dp)


def _stage_count(c: Config) -> int:
    pp = c.pipeline_model_parallel_size
    if c.num_layer_list:
        return len(c.num_layer_list)
    if c.num_layers_per_virtual_pipeline_stage:
        return c.num_layers // c.num_layers_per_virtual_pipeline_stage
    return 2 * pp if c.pipeline_schedule == "zbv" else pp


def layers_of_stages(c: Config) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage of a valid config. A noop layer counts when layers are distributed, and is left out of
    its stage."""
    counts = [int(n) for n in c.num_layer_list] or [c.num_layers // _stage_count(c)] * _stage_count(c)
    noop = {int(n) for n in c.noop_layers}
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(tuple(n for n in range(s, s + count) if n not in noop) for s, count in zip(starts, counts))


def problems(c: Config, world: int, *, idle: bool = True) -> Iterator[str]:
    """The problems with running `c` on `world` ranks, one line each. idle: also options that need more ranks.

    The order of the rules matters: a rule may divide by or parse values that an earlier rule has checked.
    """
    try:
        layout = _layout(c, world)
    except ContractError as error:
        yield str(error)
        return
    yield from _tensor_parallel(c)
    if layout.pp == 1:
        yield from _without_pipeline(c)
    else:
        yield from _schedule(c, layout)
        yield from _layer_counts(c, layout.pp)
    yield from _noop_layers(c)
    yield from _recompute_lists(c)
    if layout.pp > 1 and c.pipeline_schedule == "zbv":
        yield from _zero_bubble(c, layout)
    yield from _sequence(c)
    if c.context_parallel_size > 1:
        yield from _context_parallel(c)
    if valid_batches(c):
        yield from _global_batch(c, layout)
    if idle:
        yield from _sharded_optimizer(c, layout)
        yield from _gradient_reduction(c, layout)


def _tensor_parallel(c: Config) -> Iterator[str]:
    """Every rank holds equal shards of the attention heads, the MLP's columns and the vocabulary's rows."""
    tp, tp_size = c.tensor_model_parallel_size, f"--tensor-model-parallel-size {c.tensor_model_parallel_size}"
    if c.sequence_parallel and tp == 1:
        yield "--sequence-parallel shards what tensor parallelism replicates; it needs --tensor-model-parallel-size > 1"
    if c.tp_comm_overlap and not c.sequence_parallel:
        yield (
            "--tp-comm-overlap overlaps the gathers and reduce-scatters of --sequence-parallel, as in Megatron; add "
            "that, or remove this"
        )
    if c.tp_comm_overlap and c.fp8_format is not None:
        yield "--tp-comm-overlap has no products of float8 with their communication; remove it or --fp8-format"
    sizes = {
        "--num-attention-heads": c.num_attention_heads,
        "--num-query-groups": c.num_query_groups,
        "--ffn-hidden-size": c.ffn_hidden_size,
    }
    for name, size in sizes.items():
        if size % tp:
            yield f"{name} {size} is not divisible by {tp_size}"
    # The vocabulary is 1 until the tokenizer is known.
    if c.padded_vocab_size > 1 and c.padded_vocab_size % tp:
        yield (
            f"the padded vocabulary {c.padded_vocab_size} is not divisible by {tp_size}; "
            "see --make-vocab-size-divisible-by"
        )


def _without_pipeline(c: Config) -> Iterator[str]:
    """With a single stage, options that describe a pipeline would be ignored."""
    given = {
        "--num-layers-per-virtual-pipeline-stage": bool(c.num_layers_per_virtual_pipeline_stage),
        "--num-layer-list": bool(c.num_layer_list),
        "--pipeline-schedule zbv": c.pipeline_schedule == "zbv",
    }
    for name in (n for n, is_given in given.items() if is_given):
        yield f"{name} needs --pipeline-model-parallel-size above 1"


def _schedule(c: Config, layout: Layout) -> Iterator[str]:
    """Requirements of torch's 1F1B and interleaved 1F1B schedules (zero bubble: see `_zero_bubble`)."""
    pp, microbatches = layout.pp, _microbatches(c, layout)
    virtual = c.num_layers_per_virtual_pipeline_stage
    if virtual and c.pipeline_schedule == "zbv":
        yield "--pipeline-schedule zbv has its own two stages per rank; remove --num-layers-per-virtual-pipeline-stage"
    elif virtual:
        yield from _interleaving(c, pp, virtual)
    # Microbatches pass through the stages of interleaved 1F1B in rounds of equal numbers, of at least `pp`.
    rounds = max(1, microbatches // pp)
    if _stage_count(c) > pp and c.pipeline_schedule == "1f1b" and (microbatches < pp or microbatches % rounds):
        yield (
            f"interleaving on --pipeline-model-parallel-size {pp} needs microbatches for equal rounds of {pp} or "
            f"more; --global-batch-size {c.global_batch_size} gives {microbatches} per replica"
        )


def _interleaving(c: Config, pp: int, virtual: int) -> Iterator[str]:
    """Each rank holds several stages of `virtual` layers."""
    if c.num_layers % (virtual * pp):
        yield (
            f"--num-layers {c.num_layers} is not divisible by --num-layers-per-virtual-pipeline-stage {virtual} x "
            f"--pipeline-model-parallel-size {pp}"
        )
    elif c.num_layers == virtual * pp:
        yield f"{virtual} layers per virtual stage leave one stage per rank: that is not interleaving; use fewer"


def _layer_counts(c: Config, pp: int) -> Iterator[str]:
    """All stages have the same number of layers, unless --num-layer-list gives them."""
    counts = c.num_layer_list
    if not counts:
        if c.num_layers % _stage_count(c):
            yield f"--num-layers {c.num_layers} is not divisible by {_stage_count(c)} stages; see --num-layer-list"
    elif not all(map(str.isdigit, counts)) or "0" in counts[1:-1] or sum(map(int, counts)) != c.num_layers:
        yield (
            f"--num-layer-list {','.join(counts)} must be counts that sum to --num-layers {c.num_layers}; only the "
            "first and the last stage can be without layers"
        )
    elif len(counts) % pp or c.num_layers_per_virtual_pipeline_stage or c.pipeline_schedule == "zbv":
        yield (
            f"--num-layer-list needs --pipeline-schedule 1f1b and one count for each of {pp} ranks, or for each of "
            "their virtual stages"
        )


def _noop_layers(c: Config) -> Iterator[str]:
    """Every stage but the first and the last needs a layer: those two also hold the embedding and the output layer."""
    if not c.noop_layers:
        return
    if not _all_below(c.noop_layers, c.num_layers):
        yield f"--noop-layers {','.join(c.noop_layers)} must be indices of layers, 0 to {c.num_layers - 1}"
    elif empty := [stage for stage, layers in list(enumerate(layers_of_stages(c)))[1:-1] if not layers]:
        yield (
            f"--noop-layers {','.join(c.noop_layers)} leaves no layer on stage {empty[0]} of {_stage_count(c)}; "
            "only the first and the last stage can be without layers"
        )


def _recompute_lists(c: Config) -> Iterator[str]:
    """Lists of how many layers are recomputed have a number for every stage."""
    for name in ("recompute_layer_list", "select_recompute_layer_list"):
        given, stages = getattr(c, name), _stage_count(c)
        if given and (len(given) != stages or not _all_below(given, c.num_layers + 1)):
            yield (
                f"--{name.replace('_', '-')} {','.join(given)} must be {stages} numbers of layers, one for each "
                "pipeline stage, or virtual stage in order"
            )


def _all_below(numbers: tuple[str, ...], limit: int) -> bool:
    """Whether these option values are integers from 0 to `limit` - 1."""
    return all(n.isdigit() and int(n) < limit for n in numbers)


def _zero_bubble(c: Config, layout: Layout) -> Iterator[str]:
    """torch's ZBV schedule computes weight gradients separately from input gradients and without autograd's hooks."""
    needed, microbatches = 2 * layout.pp, _microbatches(c, layout)
    if zero_stage(c) == 3:
        yield (
            "--pipeline-schedule zbv with --zero-stage 3: torch computes wrong gradients when parameters are "
            "resharded after the forward pass; use --zero-stage 2 or --pipeline-schedule 1f1b"
        )
    # Without ZeRO, the optimizer collects 16-bit gradients into float32 sums after each microbatch; fully_shard, which
    # holds sharded gradients, has no hook for that.
    if zero_stage(c) and (c.bf16 or c.fp16):
        yield (
            "--pipeline-schedule zbv with --zero-stage would accumulate the gradients of the microbatches in 16 bits; "
            "use --zero-stage 0 or --pipeline-schedule 1f1b"
        )
    if c.overlap_grad_reduce:
        yield "--overlap-grad-reduce: --pipeline-schedule zbv computes weight gradients last; remove it"
    if microbatches < needed:
        yield (
            f"--pipeline-schedule zbv needs at least {needed} microbatches per replica, twice the stages; "
            f"--global-batch-size {c.global_batch_size} gives {microbatches}"
        )


def _sequence(c: Config) -> Iterator[str]:
    """Context-parallel ranks hold equal parts of each sequence, which sequence-parallel ranks split further.

    In a ring every rank has an early and a late chunk, so that all of them have the same number of visible keys.
    """
    cp, tp = c.context_parallel_size, c.tensor_model_parallel_size
    if cp == 1:
        if c.sequence_parallel and c.seq_length % tp:
            yield f"--sequence-parallel: --seq-length {c.seq_length} is not divisible by {tp} tensor-parallel ranks"
        return
    parts = sequence_parts(c)
    if c.seq_length % parts or (c.sequence_parallel and c.seq_length % (cp * tp)):
        yield (
            f"--context-parallel-size {cp} ({c.context_parallel_algo}): --seq-length {c.seq_length} is not divisible "
            f"by {parts}" + (f", and with --sequence-parallel by {cp * tp}" if c.sequence_parallel else "")
        )


def sequence_parts(c: Config) -> int:
    """The number that the length of a sequence must be a multiple of for context-parallel ranks to share it."""
    return math.lcm(c.context_parallel_size, 2 * c.ring_degree if c.ring_degree > 1 else 1)


def _context_parallel(c: Config) -> Iterator[str]:
    """Ulysses exchanges sequence shards for head shards; a ring passes keys and values from rank to rank."""
    cp, tp, degree, algorithm = c.context_parallel_size, c.tensor_model_parallel_size, c.ulysses_degree, "ulysses"
    if c.context_parallel_algo == "hybrid":
        algorithm = "hybrid"
        if c.ulysses_degree_in_cp is None or cp % degree or not 1 < degree < cp:
            yield (
                f"--context-parallel-algo hybrid needs --ulysses-degree-in-cp, a divisor of --context-parallel-size "
                f"{cp} between 1 and {cp}; found {c.ulysses_degree_in_cp}. With 1 it is ring, with {cp} ulysses"
            )
            return
    if (c.num_attention_heads // tp) % degree:
        yield (
            f"--context-parallel-algo {algorithm} distributes heads: --num-attention-heads {c.num_attention_heads} "
            f"over {tp} tensor-parallel ranks is not divisible by {degree} ranks; use ring"
        )
    if c.ring_degree > 1 and not c.use_flash_attn:
        yield (
            f"--context-parallel-algo {c.context_parallel_algo} merges partial results of flash attention; remove "
            "--no-flash-attn"
        )
    shares = degree * (tp if c.sequence_parallel else 1)
    if c.ring_degree > 1 and shares > 1 and shares % 2 and c.hidden_dropout:
        yield (
            f"{shares} ranks (of --sequence-parallel, or that exchange heads) split the two chunks of a ring unevenly, "
            "and dropout needs equal shards; use an even --tensor-model-parallel-size or --context-parallel-algo "
            "ulysses"
        )


def _global_batch(c: Config, layout: Layout) -> Iterator[str]:
    """Every replica computes the same number of full microbatches."""
    for size in batch_sizes(c):
        if not size % (c.micro_batch_size * layout.dp):
            continue
        name = "--rampup-batch-size" if c.rampup_batch_size else "--step-batch-size-schedule"
        name = "--global-batch-size" if size == c.global_batch_size else f"{name}: the batch size"
        yield (
            f"{name} {size} is not divisible by --micro-batch-size {c.micro_batch_size} x "
            f"{layout.dp} data-parallel replicas"
        )
    if c.eval_batch_size == c.global_batch_size:
        return
    if c.eval_batch_size % (c.micro_batch_size * layout.dp):
        yield (
            f"--eval-global-batch-size {c.eval_global_batch_size} is not divisible by --micro-batch-size "
            f"{c.micro_batch_size} x {layout.dp} data-parallel replicas"
        )
    if _stage_count(c) > layout.pp:
        yield "--eval-global-batch-size: with several stages per rank, evaluations have the batch size of training"


def _sharded_optimizer(c: Config, layout: Layout) -> Iterator[str]:
    """The optimizer state is sharded over all ranks that hold the same weights: replicas and context-parallel ranks."""
    if c.use_distributed_optimizer and c.zero_stage:
        yield "--use-distributed-optimizer is --zero-stage 1; give one of them"
    if zero_stage(c) and layout.dp * layout.cp == 1:
        yield "--zero-stage and --use-distributed-optimizer shard state over data-parallel ranks; there is only one"


def _gradient_reduction(c: Config, layout: Layout) -> Iterator[str]:
    """Buckets and their overlap are for replicated gradients; with ZeRO, fully_shard reduces layer by layer."""
    alone = layout.dp * layout.cp == 1
    if zero_stage(c) and c.overlap_grad_reduce:
        sharing = "--use-distributed-optimizer" if c.use_distributed_optimizer else "--zero-stage"
        yield f"--overlap-grad-reduce is for replicated gradients; {sharing} overlaps their reduction anyway"
    if c.overlap_grad_reduce and alone:
        yield "--overlap-grad-reduce has nothing to reduce with one data-parallel rank; remove it"
    if "ddp_bucket_size" in c.given and (zero_stage(c) or alone):
        yield "--ddp-bucket-size would be ignored: it is for replicated gradients of several data-parallel ranks"
