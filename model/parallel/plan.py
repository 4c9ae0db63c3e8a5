"""How a run is laid out over ranks, decided and checked before anything starts.

`plan` turns a config and a world size into a `Plan`, or raises ConfigError with what is wrong and what to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hal import ContractError
from hal.mesh import Layout

from ..config import Config, ConfigError


@dataclass(frozen=True)
class Plan:
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
        """How many stages the model has; a rank may hold several."""
        return len(self.layers)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage: round and round, or there and back for zbv."""
        pp = self.layout.pp
        return 2 * pp - 1 - stage if self.schedule == "zbv" and stage >= pp else stage % pp

    def stages_of(self, pp_rank: int) -> list[int]:
        """The stages of a pipeline rank, ascending."""
        return [s for s in range(self.stages) if self.rank_of(s) == pp_rank]


def sums_in_place(c: Config, plan: Plan) -> bool:
    """Whether products add to the gradients of the microbatches before (Optimizer.sum_in_place). Sharding, zero bubble
    and overlapped reduction want every gradient from autograd; torch's pipelines mix the passes of the microbatches."""
    overlapped = c.overlap_grad_reduce and plan.layout.dp * plan.layout.cp > 1
    return plan.layout.pp == 1 and plan.zero == 0 and not overlapped


def zero_stage(c: Config) -> int:
    """The ZeRO stage asked for by --zero-stage or Megatron's --use-distributed-optimizer (stage 1)."""
    return c.zero_stage or int(c.use_distributed_optimizer)


def make_plan(c: Config, world: int) -> Plan:
    """The plan of a config for `world` ranks. Raises ConfigError."""
    for problem in problems(c, world):
        raise ConfigError(problem)
    layout = _layout(c, world)
    per_stage = _split(c)
    assert c.global_batch_size
    schedule = "none" if layout.pp == 1 else c.pipeline_schedule
    if c.num_layers_per_virtual_pipeline_stage:
        schedule = "interleaved"
    microbatches = c.global_batch_size // (c.micro_batch_size * layout.dp)
    return Plan(layout, schedule, per_stage, microbatches, zero_stage(c))


def _layout(c: Config, world: int) -> Layout:
    tp, cp, pp = c.tensor_model_parallel_size, c.context_parallel_size, c.pipeline_model_parallel_size
    return Layout.of_world(world, tp=tp, cp=cp, ep=c.expert_model_parallel_size, pp=pp)


def _stages(c: Config) -> int:
    pp = c.pipeline_model_parallel_size
    if c.num_layers_per_virtual_pipeline_stage:
        return c.num_layers // c.num_layers_per_virtual_pipeline_stage
    return 2 * pp if c.pipeline_schedule == "zbv" else pp


def _split(c: Config) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage; noop layers take a place in the split but are not there."""
    counts = [int(n) for n in c.num_layer_list] or [c.num_layers // _stages(c)] * _stages(c)
    noop = {int(n) for n in c.noop_layers}
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(tuple(n for n in range(s, s + count) if n not in noop) for s, count in zip(starts, counts))


def problems(c: Config, world: int) -> Iterator[str]:
    """What is wrong with running `c` on `world` ranks, one line each."""
    if c.expert_model_parallel_size > 1:
        yield "--expert-model-parallel-size: this model has no experts to share; leave it at 1"
        return
    try:
        layout = _layout(c, world)
    except ContractError as error:
        yield str(error)
        return
    yield from _tensor(c)
    yield from _pipeline(c, layout)
    yield from _context(c)
    yield from _data(c, layout)


def _tensor(c: Config) -> Iterator[str]:
    tp, where = c.tensor_model_parallel_size, f"--tensor-model-parallel-size {c.tensor_model_parallel_size}"
    assert c.num_query_groups and c.ffn_hidden_size
    if c.sequence_parallel and tp == 1:
        yield "--sequence-parallel splits what tensor-parallel ranks repeat; it needs --tensor-model-parallel-size > 1"
    for name, size in {
        "--num-attention-heads": c.num_attention_heads,
        "--num-query-groups": c.num_query_groups,
        "--ffn-hidden-size": c.ffn_hidden_size,
    }.items():
        if size % tp:
            yield f"{where} does not divide {name} {size}; choose sizes it divides"
    if c.padded_vocab_size > 1 and c.padded_vocab_size % tp:
        yield f"{where} does not divide the padded vocabulary {c.padded_vocab_size}; see --make-vocab-size-divisible-by"


def _pipeline(c: Config, layout: Layout) -> Iterator[str]:
    pp, virtual = layout.pp, c.num_layers_per_virtual_pipeline_stage
    if pp == 1:
        given = {"--num-layers-per-virtual-pipeline-stage": virtual, "--num-layer-list": c.num_layer_list}
        given["--pipeline-schedule zbv"] = c.pipeline_schedule == "zbv"
        for name in (n for n, value in given.items() if value):
            yield f"{name} needs --pipeline-model-parallel-size above 1"
        if not any(given.values()) and _bad_numbers(c.noop_layers, c.num_layers):
            yield f"--noop-layers {','.join(c.noop_layers)}: give numbers of layers, 0 to {c.num_layers - 1}"
        return
    assert c.global_batch_size
    microbatches = c.global_batch_size // (c.micro_batch_size * layout.dp)
    if virtual and c.pipeline_schedule == "zbv":
        yield "--pipeline-schedule zbv has its own two stages per rank; remove --num-layers-per-virtual-pipeline-stage"
    elif virtual:
        if c.num_layers % (virtual * pp):
            yield (
                f"--num-layers {c.num_layers} is not divisible by --num-layers-per-virtual-pipeline-stage {virtual} x "
                f"--pipeline-model-parallel-size {pp}"
            )
        elif c.num_layers == virtual * pp:
            yield f"{virtual} layers per virtual stage leave one stage per rank: that is not interleaving; use fewer"
        if microbatches % pp:
            yield (
                f"interleaving needs a number of microbatches that --pipeline-model-parallel-size {pp} divides; "
                f"--global-batch-size {c.global_batch_size} makes {microbatches} per replica"
            )
    elif c.pipeline_schedule == "1f1b" and microbatches < pp:
        yield (
            f"--pipeline-model-parallel-size {pp} needs at least {pp} microbatches per replica; --global-batch-size "
            f"{c.global_batch_size} makes {microbatches}"
        )
    if c.num_layer_list:
        counts, stages = c.num_layer_list, pp if not virtual else 0
        if _bad_numbers(counts, c.num_layers + 1) or "0" in counts or sum(map(int, counts)) != c.num_layers:
            yield f"--num-layer-list {','.join(counts)}: positive counts that sum to --num-layers {c.num_layers}"
        elif len(counts) != (stages or len(counts)) or virtual or c.pipeline_schedule == "zbv":
            yield f"--num-layer-list gives one count for each of {pp} stages, with --pipeline-schedule 1f1b"
    elif c.num_layers % _stages(c):
        yield f"--num-layers {c.num_layers} is not divisible by {_stages(c)} stages; see --num-layer-list"
    if _bad_numbers(c.noop_layers, c.num_layers):
        yield f"--noop-layers {','.join(c.noop_layers)}: give numbers of layers, 0 to {c.num_layers - 1}"
    elif empty := [stage for stage, layers in list(enumerate(_split(c)))[1:-1] if not layers]:
        yield (
            f"--noop-layers {','.join(c.noop_layers)} leaves nothing on stage {empty[0]} of {_stages(c)}; only the "
            "first and the last can do without layers"
        )
    if c.pipeline_schedule == "zbv":
        if zero_stage(c) == 3:
            yield (
                "--pipeline-schedule zbv with --zero-stage 3: torch trains on wrong gradients when parameters are "
                "resharded after the forward pass; use --zero-stage 2 or --pipeline-schedule 1f1b"
            )
        if zero_stage(c) and (c.bf16 or c.fp16):
            yield (
                "--pipeline-schedule zbv with --zero-stage would sum 16-bit gradients of the microbatches in 16 bits; "
                "use --zero-stage 0 or --pipeline-schedule 1f1b"
            )
        if c.overlap_grad_reduce:
            yield "--overlap-grad-reduce with --pipeline-schedule zbv: weight gradients come last there; remove it"
        if microbatches < 2 * pp:
            yield (
                f"--pipeline-schedule zbv needs at least {2 * pp} microbatches per replica, twice the stages; "
                f"--global-batch-size {c.global_batch_size} makes {microbatches}"
            )


def _bad_numbers(values: tuple[str, ...], below: int) -> bool:
    return any(not v.isdigit() or int(v) >= below for v in values)


def _context(c: Config) -> Iterator[str]:
    cp, tp = c.context_parallel_size, c.tensor_model_parallel_size
    assert c.num_query_groups
    if cp == 1:
        if c.sequence_parallel and c.seq_length % tp:
            yield f"--sequence-parallel: --seq-length {c.seq_length} is not divisible by {tp} tensor-parallel ranks"
        return
    pieces = 2 * cp if c.context_parallel_algo == "ring" else cp
    if c.seq_length % pieces or (c.sequence_parallel and c.seq_length % (cp * tp)):
        yield (
            f"--context-parallel-size {cp} ({c.context_parallel_algo}): --seq-length {c.seq_length} is not divisible "
            f"into {pieces} parts" + (f" of which {tp} tensor-parallel ranks share two" if c.sequence_parallel else "")
        )
    if c.context_parallel_algo == "ulysses" and (c.num_query_groups // tp) % cp:
        yield (
            f"--context-parallel-algo ulysses hands out key/value heads: {c.num_query_groups} --num-query-groups over "
            f"{tp} tensor-parallel ranks are not divisible by --context-parallel-size {cp}; use ring"
        )
    if c.context_parallel_algo == "ring" and not c.use_flash_attn:
        yield "--context-parallel-algo ring merges partial results of flash attention; remove --no-flash-attn"
    if c.context_parallel_algo == "ring" and c.sequence_parallel and tp % 2 and c.hidden_dropout:
        yield (
            f"--sequence-parallel over {tp} ranks cuts a ring's two chunks unevenly, and dropout needs equal pieces; "
            "use an even --tensor-model-parallel-size or --context-parallel-algo ulysses"
        )


def _data(c: Config, layout: Layout) -> Iterator[str]:
    assert c.global_batch_size
    if c.global_batch_size % (c.micro_batch_size * layout.dp):
        yield (
            f"--global-batch-size {c.global_batch_size} is not divisible by --micro-batch-size {c.micro_batch_size} x "
            f"{layout.dp} data-parallel replicas"
        )
    if c.use_distributed_optimizer and c.zero_stage:
        yield "--use-distributed-optimizer is --zero-stage 1; give one of them"
    replicas = layout.dp * layout.cp
    if zero_stage(c) and replicas == 1:
        yield "--zero-stage and --use-distributed-optimizer share state among data-parallel ranks; there is only one"
    if zero_stage(c) and c.overlap_grad_reduce:
        sharing = "--use-distributed-optimizer" if c.use_distributed_optimizer else "--zero-stage"
        yield f"--overlap-grad-reduce is for replicated gradients; {sharing} reduces them as they come anyway"
    if c.overlap_grad_reduce and replicas == 1:
        yield "--overlap-grad-reduce has nothing to reduce with one data-parallel rank; remove it"
    if "ddp_bucket_size" in c.given and (zero_stage(c) or replicas == 1):
        yield "--ddp-bucket-size would be ignored: it is for replicated gradients of several data-parallel ranks"
