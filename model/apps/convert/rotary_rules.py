"""The rule of rotary positions and their scalings, which config.json has in several forms."""

from __future__ import annotations

from collections.abc import Mapping

from ...config.schema import Config
from .field_rules import Options, Rule
from .hf_config import Fields
from .weights import require

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {
    "rotary_scaling_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_LENGTH = "original_max_position_embeddings"
_FACTORS = ("short_factor", "long_factor")


def rope(
    *kinds: str, partial: bool = False, base: float = 10000.0, percent: float = 1.0, names: Mapping[str, str] = {}
) -> Rule:
    """Rotary positions. kinds: the scalings that the family's model applies besides none; default: linear, llama3 and
    yarn. partial: it may rotate a part of the channels. base, percent: those of a file without one. names: other names
    of scalings in its files.

    New files have rope_parameters; old ones rope_theta and rope_scaling, whose kind was first called "type".
    """
    kinds = kinds or ("linear", "llama3", "yarn")

    def kind_of(f: Fields) -> str:
        found = "default"
        for part in (f.part("rope_parameters"), f.part("rope_scaling")):
            for name in ("rope_type", "type"):
                kind = part.get(name, None)
                kind = names.get(kind, kind) if isinstance(kind, str) else kind
                require(
                    kind in (None, "default", *kinds),
                    f"rotary positions scaled by {kind!r} have no counterpart in HAL's model",
                )
                found = kind if kind not in (None, "default") else found
            if found == "default":
                part.only("factor", (None, 1), None)
            if not partial:
                part.only("partial_rotary_factor", (None, 1), None)
        if not partial:
            f.only("partial_rotary_factor", (None, 1), None)
        return found

    def read(f: Fields) -> Options:
        kind, new = kind_of(f), f.part("rope_parameters")
        scaled = any(new.get(name, None) not in (None, "default") for name in ("rope_type", "type"))
        scaling = new if scaled else f.part("rope_scaling")
        options: Options = {"position_embedding_type": "rope"}
        options["rotary_base"] = float(new.number("rope_theta", f.number("rope_theta", base)))
        if partial:
            part = new.number("partial_rotary_factor", f.number("partial_rotary_factor", percent))
            width = f.count("head_dim", f.count("hidden_size") // f.count("num_attention_heads"))
            require(
                int(part * width) % 2 == 0,
                f"partial_rotary_factor = {part} of heads of {width} channels has no counterpart in HAL's model: "
                f"{int(part * width)} channels are not whole pairs",
            )
            options["rotary_percent"] = part
        if kind == "linear":
            options["rotary_seq_len_interpolation_factor"] = float(scaling.number("factor"))
        if kind == "llama3":
            for name, value in _LLAMA3.items():
                scaling.only(name, (value,), value)
            options |= {"use_rope_scaling": True, "rope_scaling_factor": float(scaling.number("factor"))}
        if kind in ("yarn", "longrope"):
            scaling.only("attention_factor", (None,), None)
            longest = f.count("max_position_embeddings")
            length = f.count(_LENGTH, scaling.count(_LENGTH, longest))
            factor = float(scaling.number("factor", longest / length))
            options |= {"rope_type": kind, _LENGTH: length, "rotary_scaling_factor": factor}
            options |= _yarn(scaling) if kind == "yarn" else {n: _numbers(scaling, n) for n in _FACTORS}
        elif kinds == ("yarn",):  # latent attention, whose default is YaRN
            options["rope_type"] = "rope"
        return options

    def write(c: Config) -> Options:
        parameters: Options = {"rope_type": "default", "rope_theta": c.rotary_base}
        more: Options = {"partial_rotary_factor": c.rotary_percent} if partial else {}
        old: Options | None = None
        if c.rotary_seq_len_interpolation_factor != 1.0 and "linear" in kinds:
            parameters |= {"rope_type": "linear", "factor": c.rotary_seq_len_interpolation_factor}
        if c.use_rope_scaling and "llama3" in kinds:
            parameters |= {"rope_type": "llama3", "factor": c.rope_scaling_factor, **_LLAMA3}
        if c.rope_type == "yarn" and "yarn" in kinds:
            parameters |= {"rope_type": "yarn", _LENGTH: getattr(c, _LENGTH)}
            parameters |= {theirs: getattr(c, ours) for ours, theirs in _YARN.items()}
        if c.rope_type == "longrope" and "longrope" in kinds:
            # The file has a field for this length, which its readers prefer, and older ones refuse it elsewhere.
            more[_LENGTH] = getattr(c, _LENGTH)
            old = {"type": "longrope", **{name: [float(x) for x in getattr(c, name)] for name in _FACTORS}}
            parameters |= {"rope_type": "longrope", _LENGTH: more[_LENGTH], **old}
            del parameters["type"]
            if c.rotary_scaling_factor != c.max_position_embeddings / more[_LENGTH]:
                parameters["factor"] = old["factor"] = c.rotary_scaling_factor
        parameters |= {"partial_rotary_factor": c.rotary_percent} if partial else {}
        old = old or {n: v for n, v in parameters.items() if n not in ("rope_theta", "partial_rotary_factor")}
        scaling = {} if parameters["rope_type"] == "default" else {"rope_scaling": old}
        # Both are written: transformers 5 reads rope_parameters, and older versions read the others.
        return {"rope_parameters": parameters, "rope_theta": c.rotary_base, **more, **scaling}

    return Rule(("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", _LENGTH), read, write)


def _yarn(scaling: Fields) -> Options:
    """YaRN's options besides factor and length."""
    scaling.only("truncate", (None, True), None)
    mscale, all_dim = (float(scaling.number(name, 0.0)) for name in ("mscale", "mscale_all_dim"))
    require(bool(mscale) or not all_dim, "mscale_all_dim without mscale has no counterpart in HAL's model")
    # transformers reads the two coefficients only if neither is 0.
    options: Options = {"mscale": mscale if all_dim else 1.0, "mscale_all_dim": all_dim}
    return options | {n: float(scaling.number(n, v)) for n, v in (("beta_fast", 32.0), ("beta_slow", 1.0))}


def _numbers(f: Fields, name: str) -> tuple[str, ...]:
    """A list of numbers, as the words of an option."""
    values = f.get(name, None)
    valid = isinstance(values, list) and all(type(x) in (int, float) for x in values)
    require(valid, f"{name} should be a list of numbers; found {values!r}")
    return tuple(str(float(x)) for x in values)
