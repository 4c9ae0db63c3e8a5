"""Enumerates all layouts of a model on a number of devices that the trainer accepts, with their costs.

model/config/parallel_layout.py decides which layouts are legal, so that the planner agrees with the trainer. Options
that the user gave are fixed; the others are varied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hal import Capabilities, DeviceSpec
from hal.mesh import Layout

from ...config.device_limits import device_problems
from ...config.parallel_layout import ParallelLayout, make_parallel_layout, problems
from ...config.recomputation import lists_given
from ...config.schema import Config, ConfigError
from ...data.tokenizers.build import build_tokenizer
from .memory import Memory, memory
from .shape import Shape
from .speed import Estimate, estimate
from .traffic import Traffic, traffic

MICRO_BATCHES = (1, 2, 4, 8)
SHORTEST_CONTEXT = 4096
"""Context parallelism is not tried with fewer positions per rank than this, unless it was given."""


@dataclass(frozen=True)
class Option:
    """A legal layout and its cost. traffic and estimate are set if it fits in memory."""

    config: Config
    plan: ParallelLayout
    memory: Memory
    traffic: Traffic | None = None
    estimate: Estimate | None = None


@dataclass
class SearchResult:
    """fits: fastest first. too_large: smallest excess first. refused: the trainer's error messages and their counts."""

    fits: list[Option] = field(default_factory=list)
    too_large: list[Option] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def search(
    config: Config,
    devices: int,
    device: DeviceSpec,
    limit: float,
    capabilities: Capabilities,
    imbalance: float = 1.0,
) -> SearchResult:
    """All layouts of `config` on `devices`. A layout fits if it needs at most `limit` bytes per device.

    imbalance: rows of the experts on the rank that has the most, in multiples of the mean.
    """
    result = SearchResult()
    for candidate in candidates(config, devices, device.per_node):
        problem = next(problems(candidate, devices), None)
        if problem is not None:
            result.refused[problem] += 1
            continue
        plan = make_parallel_layout(candidate, devices)
        if beyond := list(device_problems(candidate, plan, capabilities)):
            result.refused.update(beyond)
            continue
        needed = memory(candidate, plan, imbalance, device.communicator)
        if needed.total > limit:
            result.too_large.append(Option(candidate, plan, needed))
            continue
        shape = Shape.of(candidate, plan, imbalance)
        result.fits.append(Option(candidate, plan, needed, traffic(shape), estimate(shape, device)))
    result.fits.sort(key=_seconds)
    result.too_large.sort(key=lambda o: o.memory.total)
    return result


def _seconds(option: Option) -> float:
    assert option.estimate is not None
    return option.estimate.seconds


def best_of_each(options: Sequence[Option]) -> list[Option]:
    """The first option of each combination of TP, CP, PP, DP, EP and ETP."""
    first: dict[Layout, Option] = {}
    for option in options:
        first.setdefault(option.plan.layout, option)
    return list(first.values())


def candidates(config: Config, devices: int, per_node: int) -> Iterator[Config]:
    """Configs of all layouts to consider.

    Tensor parallelism stays within a machine (or 8 ranks). Sequence parallelism is always combined with it, because it
    needs less memory for the same traffic.
    """
    c = config
    for tp in _choices(c, "tensor_model_parallel_size", _divisors(devices, max(8, per_node))):
        for cp in _choices(c, "context_parallel_size", _divisors(devices // tp, c.seq_length // SHORTEST_CONTEXT)):
            for pp in _choices(c, "pipeline_model_parallel_size", _divisors(devices // (tp * cp), c.num_layers)):
                dp = max(1, devices // (tp * cp * pp))
                for schedule, micro, zero, experts in product(
                    _schedules(c, pp),
                    _choices(c, "micro_batch_size", MICRO_BATCHES),
                    _zero(c, dp * cp),
                    _experts(c, tp, tp * cp * dp),
                ):
                    for recompute in _recomputation(c, pp, schedule):
                        yield _with(
                            c,
                            tensor_model_parallel_size=tp,
                            sequence_parallel=tp > 1,
                            tp_comm_overlap=c.tp_comm_overlap and tp > 1,
                            context_parallel_size=cp,
                            pipeline_model_parallel_size=pp,
                            micro_batch_size=micro,
                            **schedule,
                            **zero,
                            **recompute,
                            **experts,
                        )


def _with(config: Config, **values: Any) -> Config:
    """A copy with these options. Unlike building a Config, it is cheap enough for tens of thousands of candidates."""
    changed = copy(config)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def _choices(c: Config, name: str, tried: Sequence[int]) -> Sequence[int]:
    return [getattr(c, name)] if name in c.given else tried


def _divisors(n: int, largest: int) -> list[int]:
    return [d for d in range(1, min(n, max(1, largest)) + 1) if n % d == 0]


def _schedules(c: Config, pp: int) -> list[dict[str, Any]]:
    names = ("pipeline_schedule", "num_layers_per_virtual_pipeline_stage", "num_layer_list")
    if pp == 1 or c.given.intersection(names):
        return [{}]
    per_rank = c.num_layers // pp
    virtual = [{"num_layers_per_virtual_pipeline_stage": n} for n in _divisors(per_rank, per_rank - 1) if n < per_rank]
    return [{}, *virtual, {"pipeline_schedule": "zbv"}]


def _zero(c: Config, replicas: int) -> list[dict[str, Any]]:
    if replicas == 1 or c.given.intersection(("zero_stage", "use_distributed_optimizer", "overlap_grad_reduce")):
        return [{}]
    return [{"overlap_grad_reduce": True}, *({"zero_stage": stage} for stage in range(4))]


def _experts(c: Config, tp: int, ranks: int) -> list[dict[str, Any]]:
    """Expert parallelism over a pipeline stage's `ranks`, of whole experts or of those sharded like dense layers."""
    if c.num_experts is None:
        return [{}]
    sharded = _choices(c, "expert_tensor_parallel_size", sorted({1, tp}))
    return [
        {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
        for etp in sharded
        for ep in _choices(c, "expert_model_parallel_size", _divisors(c.num_experts, ranks // etp))
        if ranks % (ep * etp) == 0
    ]


def _recomputation(c: Config, pp: int, schedule: dict[str, Any]) -> list[dict[str, Any]]:
    """None, the scores (only without flash attention, which stores none), or some or all layers of every stage."""
    if "recompute_granularity" in c.given or lists_given(c):
        no_method = c.recompute_granularity == "full" and c.recompute_method is None
        return [{"recompute_method": "uniform"}] if no_method else [{}]
    chunks = 2 if schedule.get("pipeline_schedule") == "zbv" else 1
    per_stage = schedule.get("num_layers_per_virtual_pipeline_stage") or c.num_layers // (pp * chunks)
    counts = sorted({per_stage * quarter // 4 for quarter in (1, 2, 3)} - {0})
    full: dict[str, Any] = {"recompute_granularity": "full"}
    return [
        {},
        *([] if c.use_flash_attn else [{"recompute_granularity": "selective"}]),
        *(full | {"recompute_method": "block", "recompute_num_layers": n} for n in counts),
        full | {"recompute_method": "uniform", "recompute_num_layers": 1},
    ]


def set_vocabulary(config: Config) -> None:
    """Sets the config's vocabulary to that of its tokenizer, since it determines the size of the embedding."""
    try:
        config.set_vocabulary(build_tokenizer(config).vocab_size)
    except ConfigError as error:
        raise ConfigError(
            f"the vocabulary size is needed: {error}; without the tokenizer's files, give --tokenizer-type "
            "NullTokenizer --vocab-size N"
        ) from None


def require_some(result: SearchResult, devices: int) -> None:
    """Raises ConfigError with the most frequent reasons if no layout is legal."""
    if result.fits or result.too_large:
        return
    reasons = "; ".join(f"{text} ({count} x)" for text, count in result.refused.most_common(3))
    raise ConfigError(f"no layout of this model on {devices} devices is legal: {reasons or 'there was none to try'}")
