"""The result of a search as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from hal import DeviceSpec

from ...config.flops import idle_parameters
from ...config.recomputation import lists_given
from ...config.schema import Config
from .memory import Memory, explain, gib
from .search import Option, SearchResult, best_of_each
from .shape import total_parameters
from .traffic import Traffic

_SHOWN = {"activations": "act.", "gradients": "grads", "optimizer": "optim."}


def text(
    result: SearchResult,
    config: Config,
    devices: int,
    device: DeviceSpec,
    limit: float,
    top: int,
    imbalance: float = 1.0,
) -> str:
    """The layouts that fit, fastest first (the best of each division of the ranks), and the excess memory of others."""
    count = _parameters(result)
    lines = [
        f"{count / 1e9:.2f} billion parameters{_experts(config, count, imbalance)}, {config.params_dtype}, "
        f"{config.global_batch_size} sequences of {config.seq_length} per step",
        f"{devices} x {device.name}, {device.per_node} per machine; {gib(limit):.1f} of {gib(device.memory):.1f} GiB "
        f"for tensors ({device.source})",
        _generation(config),
        f"{len(result.fits)} layouts fit, {len(result.too_large)} do not, {result.refused.total()} more are not legal",
    ]
    best = best_of_each(result.fits)
    if best:
        shown = best[:top]
        divisions = "TP x CP x PP x DP" + (" x EP x ETP" if config.num_experts else "")
        lines += ["", f"The fastest of each {divisions}; GiB per device, GiB sent per device and step:", ""]
        lines += _columns([_head(config), *map(_cells, shown)])
        if len(best) > len(shown):
            lines.append(f"and {len(best) - len(shown)} more; --top shows them")
        lines += ["", f"the first as options of hal train: {flags(best[0])}"]
    too_large = best_of_each(result.too_large)[:5]
    if too_large:
        lines += ["", "do not fit, smallest excess first:"]
        lines += [
            f"  {name(o)}: {gib(o.memory.total - limit):.1f} GiB too much ({explain(o.memory)})" for o in too_large
        ]
    return "\n".join(lines)


def record(
    result: SearchResult, config: Config, devices: int, device: DeviceSpec, limit: float, imbalance: float = 1.0
) -> dict[str, Any]:
    """The complete result: all layouts that fit, and the 100 with the smallest excess."""
    return {
        "parameters": _parameters(result),
        "active_parameters": _parameters(result) - idle_parameters(config),
        **({"expert_imbalance": imbalance} if config.num_experts else {}),
        "generation_cache": {
            "elements_per_token_and_layer": cache_elements(config),
            "bytes_per_token": _cache_bytes(config),
        },
        "devices": devices,
        "accelerator": {**asdict(device), "flops": dict(device.flops)},
        "limit_bytes": limit,
        "fits": [_row(o) for o in result.fits],
        "too_large": [{**_row(o), "missing_bytes": o.memory.total - limit} for o in result.too_large[:100]],
        "not_legal": result.refused.total(),
    }


def name(option: Option) -> str:
    """A short description of a layout."""
    plan, c = option.plan, option.config
    parts = [f"{k.upper()} {n}" for k, n in asdict(plan.layout).items() if n > 1]
    chunks = plan.stages // plan.layout.pp
    parts += [f"{plan.schedule} x {chunks}"] if plan.schedule == "interleaved" else []
    parts += ["zero bubble"] if plan.schedule == "zbv" else []
    parts += [f"ZeRO {plan.zero}"] if plan.zero else []
    parts += [f"recompute {recomputation(c)}"] if recomputation(c) != "-" else []
    return ", ".join([*parts, f"micro batch {c.micro_batch_size}"])


def recomputation(c: Config) -> str:
    """A description of the recomputation: "-", "selective", "all", "block N" (layers per stage), or the lists."""
    if lists_given(c):
        lists = {"layers": c.recompute_layer_list, "attention": c.select_recompute_layer_list}
        return ", ".join(f"{name} {','.join(given)}" for name, given in lists.items() if given)
    if c.recompute_granularity == "full":
        return "all" if c.recompute_method == "uniform" else f"block {c.recompute_num_layers}"
    return c.recompute_granularity or "-"


def flags(option: Option) -> str:
    """The layout as options of `hal train`."""
    c = option.config
    names = (
        "tensor_model_parallel_size sequence_parallel context_parallel_size expert_model_parallel_size "
        "pipeline_model_parallel_size pipeline_schedule num_layers_per_virtual_pipeline_stage zero_stage "
        "use_distributed_optimizer overlap_grad_reduce recompute_granularity recompute_method recompute_num_layers"
    )
    default = Config()
    words = [f"--micro-batch-size {c.micro_batch_size}"]
    for option_name in names.split():
        value = getattr(c, option_name)
        if value != getattr(default, option_name):
            words.append(f"--{option_name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    if c.num_experts is not None and c.expert_tensor_parallel_size != c.tensor_model_parallel_size:
        words.append(f"--expert-tensor-parallel-size {c.expert_tensor_parallel_size}")
    return " ".join(words)


def _head(c: Config) -> tuple[str, ...]:
    return (
        *("TP", "CP", "PP", "VPP", "DP", *(("EP", "ETP") if c.num_experts else ()), "ZeRO", "recompute", "micro"),
        *(_SHOWN.get(f.name, f.name) for f in fields(Memory)),
        *("total", "bubble"),
        *_traffic(c),
        *("s/step", "tokens/s", "MFU"),
    )


def _traffic(c: Config) -> list[str]:
    """The kinds of traffic that a layout of this model can have."""
    return [f.name for f in fields(Traffic) if f.name != "experts" or c.num_experts]


def _cells(o: Option) -> tuple[str, ...]:
    assert o.traffic is not None and o.estimate is not None
    layout, e = o.plan.layout, o.estimate
    chunks = "V" if o.plan.schedule == "zbv" else str(o.plan.stages // layout.pp)
    experts = (layout.ep, layout.etp) if o.config.num_experts else ()
    return (
        *map(str, (layout.tp, layout.cp, layout.pp, chunks, layout.dp, *experts, o.plan.zero)),
        *(recomputation(o.config), str(o.config.micro_batch_size)),
        *(f"{gib(getattr(o.memory, f.name)):.1f}" for f in fields(Memory)),
        *(f"{gib(o.memory.total):.1f}", f"{e.bubble:.1%}"),
        *(f"{gib(getattr(o.traffic, kind)):.1f}" for kind in _traffic(o.config)),
        *(f"{e.seconds:.2f}", f"{e.tokens_per_second:.3g}", f"{e.mfu:.1%}"),
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def _row(o: Option) -> dict[str, Any]:
    c, layout = o.config, o.plan.layout
    row: dict[str, Any] = {
        **asdict(layout),
        "schedule": o.plan.schedule,
        "stages_per_rank": o.plan.stages // layout.pp,
        "sequence_parallel": c.sequence_parallel,
        "zero_stage": o.plan.zero,
        "recompute": recomputation(c),
        "micro_batch_size": c.micro_batch_size,
        "microbatches": o.plan.microbatches,
        "memory_bytes": {**asdict(o.memory), "total": o.memory.total},
        "options": flags(o),
    }
    if o.traffic is not None and o.estimate is not None:
        row["traffic_bytes_per_step"] = {**asdict(o.traffic), "total": o.traffic.total}
        row["estimate"] = asdict(o.estimate)
    return row


def _experts(c: Config, count: int, imbalance: float) -> str:
    """What the first line says of the experts, of which the devices with the most rows determine memory and time."""
    if c.num_experts is None:
        return ""
    return (
        f", of which a token uses {(count - idle_parameters(c)) / 1e9:.2f} billion ({c.num_experts} experts, "
        f"{c.moe_router_topk} per token, at most {imbalance:g} x the mean rows per device)"
    )


def cache_elements(c: Config) -> int:
    """Elements that generation keeps of a token in each layer, all tensor-parallel ranks' heads together."""
    return sum(heads * channels for heads, channels in c.cached_heads(0))


def _cache_bytes(c: Config) -> int:
    """Bytes that generation keeps of a token in all layers."""
    return (c.num_layers - len(c.noop_layers)) * cache_elements(c) * c.params_dtype.itemsize


def _generation(c: Config) -> str:
    """The size of the cache of generation; with latent attention, beside that of the keys and values of all heads."""
    count, kind = cache_elements(c), "keys and values"
    if c.multi_latent_attention:
        expanded = c.num_attention_heads * sum(c.head_sizes)
        kind = (
            f"a latent of {c.kv_lora_rank} and a rotated key of {c.qk_pos_emb_head_dim}, alike on every "
            f"tensor-parallel rank; keys and values of all heads would be {expanded:,}"
        )
    return (
        f"generation caches {count:,} elements per token and layer ({kind}), {_cache_bytes(c) / 1024:,.1f} KiB per "
        "token in all layers"
    )


def _parameters(result: SearchResult) -> int:
    option = (result.fits or result.too_large)[0]
    return total_parameters(option.config)
