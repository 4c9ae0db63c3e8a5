"""Every layout of a model on a number of devices that the trainer would accept, with what it costs.

What is legal is asked of model/parallel/plan.py, so the planner cannot disagree with the trainer. Options the user gave
are kept; the others are tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from hal import Accelerator
from hal.mesh import Layout

from ..config import Config, ConfigError
from ..parallel.plan import Plan, make_plan, problems
from ..tokenizer import build_tokenizer
from .memory import Memory, memory
from .shape import Shape
from .speed import Estimate, estimate
from .traffic import Traffic, traffic

MICRO_BATCHES = (1, 2, 4, 8)
SHORTEST_CONTEXT = 4096
"""Positions per rank below which context parallelism is not tried unless asked for."""


@dataclass(frozen=True)
class Option:
    """A legal layout and its cost; traffic and estimate are there if it fits."""

    config: Config
    plan: Plan
    memory: Memory
    traffic: Traffic | None = None
    estimate: Estimate | None = None


@dataclass
class Found:
    """fits: fastest first. too_large: least missing first. refused: how often the trainer would say what."""

    fits: list[Option] = field(default_factory=list)
    too_large: list[Option] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def search(config: Config, devices: int, device: Accelerator, limit: float) -> Found:
    """All layouts of `config` on `devices`, of which those within `limit` bytes per device fit."""
    found = Found()
    for candidate in candidates(config, devices, device.per_node):
        problem = next(problems(candidate, devices), None)
        if problem is not None:
            found.refused[problem] += 1
            continue
        plan = make_plan(candidate, devices)
        needed = memory(candidate, plan)
        if needed.total > limit:
            found.too_large.append(Option(candidate, plan, needed))
            continue
        shape = Shape.of(candidate, plan)
        found.fits.append(Option(candidate, plan, needed, traffic(shape), estimate(shape, device)))
    found.fits.sort(key=_seconds)
    found.too_large.sort(key=lambda o: o.memory.total)
    return found


def _seconds(option: Option) -> float:
    assert option.estimate is not None
    return option.estimate.seconds


def best_of_each(options: Sequence[Option]) -> list[Option]:
    """The first of the options of every combination of TP, CP, PP and DP."""
    first: dict[Layout, Option] = {}
    for option in options:
        first.setdefault(option.plan.layout, option)
    return list(first.values())


def candidates(config: Config, devices: int, per_node: int) -> Iterator[Config]:
    """Configs of every layout worth asking about.

    Tensor parallelism stays within a machine (or 8 ranks); sequence parallelism is on wherever there is tensor
    parallelism, because it sends as much and holds less.
    """
    c = config
    for tp in _choices(c, "tensor_model_parallel_size", _divisors(devices, max(8, per_node))):
        for cp in _choices(c, "context_parallel_size", _divisors(devices // tp, c.seq_length // SHORTEST_CONTEXT)):
            for pp in _choices(c, "pipeline_model_parallel_size", _divisors(devices // (tp * cp), c.num_layers)):
                dp = max(1, devices // (tp * cp * pp))
                for how in _schedules(c, pp):
                    for micro in _choices(c, "micro_batch_size", MICRO_BATCHES):
                        for zero in _zero(c, dp * cp):
                            for again in _recomputation(c, pp, how):
                                yield _with(
                                    c,
                                    tensor_model_parallel_size=tp,
                                    sequence_parallel=tp > 1,
                                    context_parallel_size=cp,
                                    pipeline_model_parallel_size=pp,
                                    micro_batch_size=micro,
                                    **how,
                                    **zero,
                                    **again,
                                )


def _with(config: Config, **values: Any) -> Config:
    """A copy with these options; cheaper than building a Config, which matters for tens of thousands."""
    made = copy(config)
    for name, value in values.items():
        setattr(made, name, value)
    return made


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


def _recomputation(c: Config, pp: int, how: dict[str, Any]) -> list[dict[str, Any]]:
    """Nothing, the scores (without flash attention, which keeps none), or some or all layers of every stage."""
    if "recompute_granularity" in c.given:
        unsaid = c.recompute_granularity == "full" and c.recompute_method is None
        return [{"recompute_method": "uniform"}] if unsaid else [{}]
    chunks = 2 if how.get("pipeline_schedule") == "zbv" else 1
    per_stage = how.get("num_layers_per_virtual_pipeline_stage") or c.num_layers // (pp * chunks)
    some = sorted({per_stage * quarter // 4 for quarter in (1, 2, 3)} - {0})
    full: dict[str, Any] = {"recompute_granularity": "full"}
    return [
        {},
        *([] if c.use_flash_attn else [{"recompute_granularity": "selective"}]),
        *(full | {"recompute_method": "block", "recompute_num_layers": n} for n in some),
        full | {"recompute_method": "uniform", "recompute_num_layers": 1},
    ]


def set_vocabulary(config: Config) -> None:
    """Gives the config its tokenizer's vocabulary, which decides the embedding's size."""
    try:
        config.set_vocabulary(build_tokenizer(config).vocab_size)
    except ConfigError as error:
        raise ConfigError(
            f"the size of the vocabulary is needed: {error}; without the tokenizer's files, give --tokenizer-type "
            "NullTokenizer --vocab-size N"
        ) from None


def require_some(found: Found, devices: int) -> None:
    """Raises ConfigError with the commonest reasons if no layout is legal."""
    if found.fits or found.too_large:
        return
    reasons = "; ".join(f"{text} ({count} x)" for text, count in found.refused.most_common(3))
    raise ConfigError(f"no layout of this model on {devices} devices is legal: {reasons or 'none was found to try'}")
