"""Rules between fields of a config.json and options of HAL's model, each of which reads and writes.

A row of the table of families (families.py) is a list of them. What a rule does not support raises ConversionError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config.schema import Config
from .hf_config import Fields
from .weights import require

Options = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """fields: the names that it reads. read: options of the fields. write: fields of the options."""

    fields: tuple[str, ...]
    read: Callable[[Fields], Options]
    write: Callable[[Config], Options]


def _plain(kind: str, option: str, field: str, default: Any) -> Rule:
    def read(f: Fields) -> Options:
        if default is None and f.get(field, None) is None and kind != "required":
            return {}  # the option's default follows from others, as the field's does
        return {option: f.count(field) if kind == "required" else getattr(f, kind)(field, default)}

    return Rule((field,), read, lambda c: {field: getattr(c, option)})


def required(option: str, field: str) -> Rule:
    """A count that every file has."""
    return _plain("required", option, field, None)


def count(option: str, field: str, default: int | None = None) -> Rule:
    """A count. Without a default, a file that lacks it has the default that follows from other options."""
    return _plain("count", option, field, default)


def number(option: str, field: str, default: float | None = None) -> Rule:
    """A number."""
    return _plain("number", option, field, default)


def untied(default_tied: bool) -> Rule:
    """tie_word_embeddings, whose opposite is the option."""
    name, option = "tie_word_embeddings", "untie_embeddings_and_output_weights"
    return Rule(
        (name,),
        lambda f: {option: not f.flag(name, default_tied)},
        lambda c: {name: not c.untie_embeddings_and_output_weights},
    )


def constant(field: str, value: Any, *, missing: Any = None, options: Options | None = None) -> Rule:
    """A field that must have this value (or be missing, if `missing` is also that value), and stands for `options`."""

    def read(f: Fields) -> Options:
        f.only(field, (value,), value if missing is None else missing)
        return dict(options or {})

    return Rule((field,), read, lambda c: {field: value})


def choice(field: str, values: Mapping[Any, Options], default: Any) -> Rule:
    """A field each of whose values stands for options; of several values for the same options, the first is written."""

    def read(f: Fields) -> Options:
        f.only(field, values, default)
        return dict(values[default if f.get(field, default) is None else f.get(field, default)])

    def write(c: Config) -> Options:
        match = [v for v, options in values.items() if all(getattr(c, n) == x for n, x in options.items())]
        return {field: match[0] if match else next(iter(values))}

    return Rule((field,), read, write)


def fixed(**options: Any) -> Rule:
    """Options that all models of a family have, and no field."""
    return Rule((), lambda f: dict(options), lambda c: {})


def written(field: str, option: str) -> Rule:
    """A field that transformers needs beside the one that the option comes from."""
    return Rule((field,), lambda f: {}, lambda c: {field: getattr(c, option)})


def _biases(attention: bool, mlp: bool) -> Options:
    if attention and mlp:
        return {"disable_bias_linear": False}
    return {"disable_bias_linear": True, "add_qkv_bias": attention, "add_dense_bias": attention, "add_mlp_bias": mlp}


def linear_biases() -> Rule:
    """Llama's biases: those of attention's two layers, and those of the MLP's."""
    return Rule(
        ("attention_bias", "mlp_bias"),
        lambda f: _biases(f.flag("attention_bias", False), f.flag("mlp_bias", False)),
        lambda c: {"attention_bias": c.projection_bias, "mlp_bias": c.mlp_bias},
    )


def attention_biases(default: bool = False, *, mlp: bool = False) -> Rule:
    """The biases of attention's two layers, of a family in which the MLP always has biases, or never."""
    return Rule(
        ("attention_bias",),
        lambda f: _biases(f.flag("attention_bias", default), mlp),
        lambda c: {"attention_bias": c.projection_bias},
    )


Pattern = Callable[[Fields, int], Sequence[bool]]
"""(fields, number of layers) -> a property of each layer, for files that do not list it."""


def behind(f: Fields, layers: int) -> list[bool]:
    """Qwen's layers with a window: those from max_window_layers on."""
    return [n >= f.number("max_window_layers", 28) for n in range(layers)]


def every_other(f: Fields, layers: int) -> list[bool]:
    """Gemma 2's layers with a window: the first, the third, and so on."""
    return [n % 2 == 0 for n in range(layers)]


def unrotated(f: Fields, layers: int) -> list[bool]:
    """SmolLM3's layers without rotary positions, which are those with a window."""
    listed, interval = f.get("no_rope_layers", None), f.count("no_rope_layer_interval", 4)
    require(listed is None or isinstance(listed, list), f"no_rope_layers should be a list; found {listed!r}")
    return [(n + 1) % interval == 0 for n in range(layers)] if listed is None else [not rotated for rotated in listed]


def _layers_of(f: Fields) -> int:
    return min(f.count("num_hidden_layers"), 10_000)  # a corrupt number would take long


def _listed(pattern: Sequence[bool]) -> str:
    return str([int(entry) for entry in pattern]).replace(" ", "")


def no_rope() -> Rule:
    """no_rope_layers, of which 1 is a layer with rotary positions and 0 one without."""

    def read(f: Fields) -> Options:
        pattern = unrotated(f, _layers_of(f))
        return {"no_rope_freq": _listed(pattern)} if any(pattern) else {}

    def write(c: Config) -> Options:
        return {"no_rope_layers": [int(c.has_rotation(n)) for n in range(c.num_layers)]}

    return Rule(("no_rope_layers", "no_rope_layer_interval"), read, write)


def window(layers: Pattern | None = None, *, switch: bool = False, default: int | None = None) -> Rule:
    """sliding_window, the tokens that a query sees including its own; --pre-tokens does not count that one.

    layers: the layers that have it in a file without layer_types; None: all layers, and layer_types is not read.
    switch: it is only used with use_sliding_window, which is off in a file that lacks it. default: the width in a file
    without one.
    """
    names = ("full_attention", "sliding_attention")

    def read(f: Fields) -> Options:
        kinds = f.get("layer_types", None) or ()
        known = isinstance(kinds, (list, tuple)) and all(k in names for k in kinds)
        require(known, f"layer_types = {kinds!r} has no counterpart in HAL's model")
        if f.get("sliding_window", default) is None or not f.flag("use_sliding_window", not switch):
            return {}
        width, length = f.count("sliding_window", default), f.count("max_position_embeddings")
        sliding = [kind == names[1] for kind in kinds] or (layers or every_layer)(f, _layers_of(f))
        if width >= length or (layers is not None and not any(sliding)):
            return {}
        require(layers is not None or all(sliding), "an attention window in some layers only is not in this family")
        return {"pre_tokens": width - 1} | ({} if all(sliding) else {"window_attn_skip_freq": _listed(sliding)})

    def write(c: Config) -> Options:
        sliding = [c.window_of(n) != (None, 0) for n in range(c.num_layers)]
        # Where files without a width have one, so has a model that does not use it.
        fields: Options = {"sliding_window": default if c.pre_tokens is None else c.pre_tokens + 1}
        if layers is not None:
            fields["layer_types"] = [names[entry] for entry in sliding]
        if switch:
            fields |= {"use_sliding_window": any(sliding)}
        if layers is behind:
            fields |= {"max_window_layers": [*sliding, True].index(True)}
        return fields

    return Rule(("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), read, write)


def every_layer(f: Fields, layers: int) -> list[bool]:
    """All layers."""
    return [True] * layers


def cap(option: str, field: str, default: float | None) -> Rule:
    """A soft cap, which null turns off. default: that of a file without the field."""

    def read(f: Fields) -> Options:
        return {} if f.get(field, default) is None else {option: float(f.number(field, default))}

    return Rule((field,), read, lambda c: {field: getattr(c, option)})


def power(option: str, field: str, exponent: float, default: float | None = None) -> Rule:
    """A field that is the option's value to the power of 1 / exponent."""

    def read(f: Fields) -> Options:
        value = f.number(field, default)
        require(value > 0, f"{field} should be positive; found {value!r}")
        return {option: float(value**exponent)}

    def write(c: Config) -> Options:
        value = (getattr(c, option) or c.kv_channels**-0.5) ** (1.0 / exponent)
        # The power of a power is off by a rounding; the fields are whole numbers in practice.
        return {field: round(value) if abs(value - round(value)) < 1e-9 * value else value}

    return Rule((field,), read, write)


def scaled_embedding() -> Rule:
    """Gemma's factor of the word embeddings, which follows from their size."""
    return Rule((), lambda f: {"embedding_multiplier_scale": float(f.count("hidden_size") ** 0.5)}, lambda c: {})


def _layers_with_experts(c: Config) -> list[bool]:
    return [c.has_experts(layer) for layer in range(c.num_layers)]


def sparse_layers() -> Rule:
    """Qwen's layers with experts: every decoder_sparse_step-th but those of mlp_only_layers."""

    def read(f: Fields) -> Options:
        step, dense = f.count("decoder_sparse_step", 1), f.get("mlp_only_layers", [])
        require(isinstance(dense, list), f"mlp_only_layers should be a list; found {dense!r}")
        pattern = [n not in dense and (n + 1) % step == 0 for n in range(_layers_of(f))]
        return {"moe_layer_freq": _listed(pattern)}

    def write(c: Config) -> Options:
        dense = [n for n, experts in enumerate(_layers_with_experts(c)) if not experts]
        return {"mlp_only_layers": dense, "decoder_sparse_step": 1}

    return Rule(("mlp_only_layers", "decoder_sparse_step"), read, write)


def dense_first() -> Rule:
    """DeepSeek's layers with experts: all but the first first_k_dense_replace."""

    def read(f: Fields) -> Options:
        layers, dense = f.count("num_hidden_layers"), f.number("first_k_dense_replace", 3)
        require(dense in range(layers + 1), f"first_k_dense_replace should be a number of layers; found {dense!r}")
        return {"moe_layer_freq": f"[0]*{dense}+[1]*{layers - dense}"}

    return Rule(
        ("first_k_dense_replace",),
        read,
        lambda c: {"first_k_dense_replace": ([*_layers_with_experts(c), True]).index(True)},
    )


def normalised_topk(default: int) -> Rule:
    """The number of experts of a token, whose sigmoid scores are divided by their sum if there are several. A single
    score is left as it is: divided by itself it would be 1."""

    def read(f: Fields) -> Options:
        experts = f.count("num_experts_per_tok", default)
        f.only("norm_topk_prob", (experts > 1,), True)
        return {"moe_router_topk": experts}

    def write(c: Config) -> Options:
        return {"num_experts_per_tok": c.moe_router_topk, "norm_topk_prob": c.moe_router_topk > 1}

    return Rule(("num_experts_per_tok", "norm_topk_prob"), read, write)


def expert_groups() -> Rule:
    """The groups of experts from which the router chooses; one group is none."""

    def read(f: Fields) -> Options:
        groups = f.count("n_group", 8)
        if groups == 1:
            return {}
        return {"moe_router_num_groups": groups, "moe_router_group_topk": f.count("topk_group", 4)}

    def write(c: Config) -> Options:
        return {"n_group": c.moe_router_num_groups or 1, "topk_group": c.moe_router_group_topk or 1}

    return Rule(("n_group", "topk_group"), read, write)


def shared_experts() -> Rule:
    """Experts that every token uses: a number of them, which compute what one of their joint width computes."""

    def read(f: Fields) -> Options:
        experts = f.get("n_shared_experts", 1)
        if experts is None or experts == 0:
            return {}
        width = f.count("n_shared_experts", 1) * f.count("moe_intermediate_size")
        return {"moe_shared_expert_intermediate_size": width}

    def write(c: Config) -> Options:
        return {"n_shared_experts": (c.moe_shared_expert_intermediate_size or 0) // c.moe_ffn_hidden_size or None}

    return Rule(("n_shared_experts",), read, write)


def old_names(rule: Rule, **names: str) -> Rule:
    """A rule of fields that old files call otherwise. names: the old name of each."""

    def read(f: Fields) -> Options:
        for new, old in names.items():
            f = f if f.get(old, None) is None else f.renamed(old, new)
        return rule.read(f)

    return Rule((*rule.fields, *names.values()), read, rule.write)
