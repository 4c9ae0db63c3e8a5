"""Applies a row of the table of families: options and fields of config.json, and tensors in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ...config.schema import Config
from ...gpt.model import shapes
from ...training.trainer_state import architecture
from .family import Family
from .field_rules import window
from .hf_config import Fields
from .tensor_layout import Layout
from .weights import ConversionError, LazyTensors, require

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

# Fields that families add to config.json, and the values at which they have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1),
    "clip_qkv": (None,),
    "use_bidirectional_attention": (None, False),
    "query_pre_attn_scalar": (None,),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "no_rope_layers": (None, []),
    "quantization_config": (None,),
}

_SIZES = (
    "hidden_size",
    "ffn_hidden_size",
    "kv_channels",
    "moe_ffn_hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
_LATENT = _SIZES[4:]


def options_of(family: Family, fields: Fields) -> dict[str, Any]:
    """HAL's options for a config.json. Raises ConversionError for fields that change results and have no option."""
    own = {name for rule in family.rules for name in rule.fields}
    for name, values in _NEUTRAL.items():
        if name not in own:
            fields.only(name, values, None)
    if "sliding_window" not in own and fields.get("sliding_window", None) is not None:
        require(not window().read(fields), f"the {family.model_type} model of transformers has no sliding window")
    options: dict[str, Any] = {}
    for rule in family.rules:
        options |= rule.read(fields)
    return options


def fields_of(family: Family, c: Config) -> dict[str, Any]:
    """The fields of config.json for HAL's options, without those of vocabulary and precision."""
    fields: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for rule in family.rules:
        fields |= rule.write(c)
    return fields


def reasons_against(family: Family, c: Config) -> list[str]:
    """The options of a model that a family cannot express: those that are different after writing and reading."""
    mixture = "mlp.router" in family.layer
    if mixture != (c.num_experts is not None):
        return ["no --num-experts" if mixture else f"--num-experts {c.num_experts}"]
    try:
        options = options_of(family, Fields(fields_of(family, c), family.model_type))
        back = Config(**{**options, "seq_length": c.seq_length})
    except (ConversionError, TypeError, ValueError) as error:
        return [str(error)]

    def compared(config: Config) -> dict[str, Any]:
        values = architecture(config)
        for name in _SIZES:
            latent = name in _LATENT
            if latent == config.multi_latent_attention or name in ("hidden_size", "ffn_hidden_size"):
                values[name] = getattr(config, name)
        values.pop("moe_ffn_hidden_size" if config.num_experts is None else "", None)
        if config.position_embedding_type == "learned_absolute":
            values["max_position_embeddings"] = config.max_position_embeddings
        if not (c.qk_layernorm or c.rotary_percent < 1.0):
            values.pop("rotary_interleaved", None)  # expressed by the order of rows
        return values

    ours, theirs = compared(c), compared(back)
    # An option without a value has no effect because of another, which is listed.
    return [_flag(name, x) for name, x in ours.items() if x is not None and theirs.get(name) != x] or [
        _flag(name, x) for name, x in theirs.items() if ours.get(name) != x
    ]


def _flag(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is False:
        return f"no {option}"
    return option if value is True else f"{option} {value}"


def correspondence(family: Family, c: Config) -> Iterator[tuple[str, Layout, list[str]]]:
    """(our name, layout, their names) of every tensor of the model. Raises ConversionError for a tensor that the family
    does not have."""
    for name in shapes(c):
        match = _LAYER.fullmatch(name)
        table, inner = (family.layer, match[2]) if match else (family.whole, name)
        prefix = f"{family.layers}.{match[1]}." if match else ""
        if inner in table:
            layout, part = table[inner], ""
        else:
            module, _, part = inner.rpartition(".")
            require(module in table, f"{family.model_type} models have no tensor for {name}")
            layout, part = table[module], f".{part}"
        names = [
            f"{prefix}{their.replace('{e}', str(e))}{part}" for e in range(layout.count(c)) for their in layout.names
        ]
        yield name, layout, names


def read(family: Family, c: Config, source: LazyTensors) -> LazyTensors:
    """The tensors of HAL's model, each computed from theirs when it is read. Raises ConversionError unless `source` has
    exactly the tensors of the model."""
    prefix = family.base if not any(name.startswith(family.base) for name in source) else ""
    used: set[str] = set()
    result = LazyTensors()
    for ours, layout, theirs in correspondence(family, c):
        stored = [name.removeprefix(prefix) if prefix else name for name in theirs]
        missing = [name for name in stored if name not in source]
        if missing:
            note = "the output weights are not tied, but there is " if ours.startswith("output_layer") else ""
            raise ConversionError(f"{note}no tensor {missing[0]!r} (of {ours})")
        used.update(stored)

        def load(tensors: Mapping[str, Tensor], layout: Layout = layout, stored: list[str] = stored) -> Tensor:
            return layout.join([tensors[name] for name in stored], c)

        try:
            result.add(ours, lambda load=load: load(source), load(source.metas))  # type: ignore[misc]
        except RuntimeError as error:
            raise ConversionError(f"{ours} does not have the shape that config.json requires: {error}") from None
    tied = {"lm_head.weight"} - used  # files may hold the tied copy
    extra = [n for n in source if n not in used | tied and not any(re.fullmatch(p, n) for p in family.ignored)]
    kind = family.model_type
    require(not extra, f"tensors that do not belong to a {kind} model: {', '.join(sorted(extra)[:5])}")
    return result
