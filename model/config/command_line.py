"""Reads options from the command line, files and the environment into a Config, in this order of precedence.

A file may contain HAL's own options or the configuration of MindSpeed-Core-MS, the MindFormers tutorial or DeepSpeed
(config/formats). The source of every value is recorded (`Config.origins`).

YAML keys and environment variables are named like the flags (`num-layers` or `num_layers`; `HAL_NUM_LAYERS`). An
unknown name is an error that suggests the closest valid one.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from .formats import deepspeed, mindformers, mindspeed
from .formats.renamed_options import ELSEWHERE
from .formats.rules import MICROBATCHES, Reading, flag, translate
from .formats.strict_yaml import load
from .parallel_layout import zero_stage
from .schema import Config, ConfigError, GivenOptions, ready_configuration, resolve
from .tokenizer_options import OPTIONS, readers
from .validation import check, world_size

GROUPS = {
    "backend": "execution",
    "num_layers": "the model",
    "data_path": "data",
    "micro_batch_size": "training",
    "tensor_model_parallel_size": "parallelism",
    "save": "checkpoints, evaluation, logging",
}
"""Titles of the groups in --help, by the first option of each group."""

_TYPES = typing.get_type_hints(Config)
_OPTIONS = {f.name: f for f in fields(Config) if f.init}
_SPELLINGS = {
    spelling: name
    for name, option in _OPTIONS.items()
    for spelling in (name.replace("_", "-"), *option.metadata["aliases"], option.metadata["no"])
    if spelling
}
"""Field names by every spelling of their flags, without leading dashes."""


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    """The checked Config of a command line. Raises ConfigError; exits for --help."""
    return build(read(argv, environ))


def read(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> GivenOptions:
    """Option values by field name, from all sources. Raises ConfigError; exits for --help."""
    namespace = vars(_parse_known(argv))
    path, zero_path = namespace.pop("config", None), namespace.pop("deepspeed_config", None)
    values, variables = GivenOptions(), _environment(os.environ if environ is None else environ)
    values.take(variables, {name: f"HAL_{name.upper()}" for name in variables})
    # microbatches: requirements on their number; foreign: options that came from another system's file.
    microbatches, foreign = [], set()
    if path is not None:
        reading = read_config(path)
        foreign |= reading.foreign
        microbatches += _microbatches(reading)
        values.take(reading.values, {name: f"{reading.file}: {key}" for name, key in reading.origins.items()})
        values.notes += reading.notes
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in namespace.items()}
    if values.get("tokenizer_type") != given.get("tokenizer_type", values.get("tokenizer_type")):
        # A tokenizer given on the command line replaces the file's tokenizer and all its options.
        for name in OPTIONS:
            if given["tokenizer_type"] not in readers(name):
                values.pop(name, None)
    values.take(given, dict.fromkeys(given, "command line"))
    if zero_path is not None:
        reading = _read_deepspeed(zero_path)
        microbatches += _microbatches(reading)
        foreign |= reading.foreign - set(values)
        _agree(reading, values)
        values.notes += reading.notes
    for count, where in microbatches:
        _require_microbatches(values, count, where)
    _drop_idle_reduction(values, foreign - set(given))
    return values


def _drop_idle_reduction(values: GivenOptions, foreign: set[str]) -> None:
    """Turns options of the gradient reduction into notes if there is no such reduction.

    Other systems' files contain these options for every layout. As options of HAL they would be errors in that case
    (parallel_layout.py).
    """
    probe = Config(**values)
    replica = probe.tensor_model_parallel_size * probe.pipeline_model_parallel_size
    alone, zero = world_size(probe) <= replica, zero_stage(probe)
    for name in {"ddp_bucket_size", "overlap_grad_reduce"} & foreign & set(values):
        if alone or zero:
            why = f"with ZeRO stage {zero} every layer is one bucket" if zero else "one replica has nothing to reduce"
            values.notes.append(f"{values.origins.pop(name)}: {values.pop(name)!r} has no effect: {why}")


def _microbatches(reading: Reading) -> list[tuple[int, str]]:
    """(microbatches per step and replica, the key that requires it), if the file has one."""
    count, key = reading.values.pop(MICROBATCHES, None), reading.origins.pop(MICROBATCHES, "")
    return [] if count is None else [(count, f"{reading.file}: {key}")]


def _agree(reading: Reading, values: GivenOptions) -> None:
    """Adds a file's values to those given elsewhere. Values must agree; only environment variables are overridden."""
    for name, value in reading.values.items():
        origin = values.origins.get(name, "")
        if name in values and values[name] != value and not origin.startswith("HAL_"):
            raise ConfigError(
                f"{reading.file}: {reading.origins[name]} and {origin} contradict each other about {flag(name)}: "
                f"{value!r} and {values[name]!r}; remove one of them"
            )
        if name not in values or origin.startswith("HAL_"):
            values.take({name: value}, {name: f"{reading.file}: {reading.origins[name]}"})


def _require_microbatches(values: GivenOptions, count: int, where: str) -> None:
    """Sets the global batch size to `count` microbatches per replica. Raises ConfigError if it was given otherwise."""
    probe = Config(**values)
    replica = probe.tensor_model_parallel_size * probe.pipeline_model_parallel_size * probe.context_parallel_size
    replicas = max(1, world_size(probe) // max(1, replica))
    size = count * probe.micro_batch_size * replicas
    if values.get("global_batch_size", size) != size:
        raise ConfigError(
            f"{where} requires {count} microbatches of {probe.micro_batch_size} on each of {replicas} replicas, a "
            f"global batch of {size}, but --global-batch-size is {values['global_batch_size']}; remove one of them"
        )
    if "global_batch_size" not in values:
        values.take({"global_batch_size": size}, {"global_batch_size": where})


def build(values: Mapping[str, Any], check: Callable[[Config], None] = check) -> Config:
    """A validated Config from option values by field name. All values count as given by the user."""
    for name in values:
        if name not in _OPTIONS:
            raise ConfigError(f"there is no option '{name}'.{_nearest(name)}")
    config = resolve(values)
    check(config)
    return config


def read_config(path: str) -> Reading:
    """Reads a --config file: HAL's options by name, or the sections of MindSpeed-Core-MS or the MindFormers tutorial.

    Raises ConfigError for any other content, for unknown keys and for values that HAL cannot follow.
    """
    named = Path(path).name == path and not path.endswith((".yaml", ".yml", ".json"))
    file = ready_configuration(path) if named else Path(path)
    content = load(file, f"--config {path}")
    if content is None:
        raise ConfigError(f"--config {path} is empty; it must hold `option: value` lines")
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold `option: value` lines; it holds {type(content).__name__}")
    reading = Reading(f"--config {path}", convert)
    if any(section in content for section in mindformers.SECTIONS[:2]):
        front: Any = mindformers
    elif any(section in content for section in mindspeed.SECTIONS):
        model = content.get("model_config")
        front = mindformers if isinstance(model, dict) and "llm" in model else mindspeed
    else:
        _read_flat(reading, content)
        return reading
    # HAL's options may be mixed with the sections, because those systems set some options on their command lines.
    ours = {key: value for key, value in content.items() if str(key).replace("_", "-") in _SPELLINGS}
    translate(reading, {key: value for key, value in content.items() if key not in ours}, front.rules())
    front.finish(reading)
    reading.foreign = set(reading.values)
    _read_flat(reading, ours)
    return reading


def _read_flat(reading: Reading, content: Mapping[Any, Any]) -> None:
    spelled_as: dict[str, Any] = {}
    for key, value in content.items():
        spelled = str(key).replace("_", "-")
        name = _SPELLINGS.get(spelled)
        if name is None:
            raise ConfigError(f"{reading.file}: there is no option '{key}'.{_nearest(spelled)}")
        if name in spelled_as:
            raise ConfigError(f"{reading.file} sets '{name}' twice, as {spelled_as[name]} and as {key}")
        spelled_as[name] = key
        if value is not None:
            value = convert(name, value, f"{reading.file}: {key}")
            reading.set(name, not value if spelled == _OPTIONS[name].metadata["no"] else value, str(key))


def _read_deepspeed(path: str) -> Reading:
    reading = Reading(f"--deepspeed-config {path}", convert)
    content = deepspeed.without_auto(load(Path(path), reading.file))
    if not isinstance(content, dict):
        raise ConfigError(f"{reading.file} must be a JSON object; it is {type(content).__name__}")
    translate(reading, content, deepspeed.rules())
    deepspeed.finish(reading)
    reading.foreign = set(reading.values)
    return reading


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    texts = {name: environ.get(f"HAL_{name.upper()}") for name in _OPTIONS}
    return {name: convert(name, text, f"HAL_{name.upper()}") for name, text in texts.items() if text}


def _kind(name: str) -> type:
    hint = _TYPES[name]
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not types.NoneType)
    return tuple if typing.get_origin(hint) is tuple else hint


def convert(name: str, value: Any, where: str) -> Any:
    """`value` converted to the option's type: YAML reads 1e-3 as a string, and environment variables are strings.

    Raises ConfigError; `where` is the place that the message names.
    """
    kind = _kind(name)
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[str(value).lower()]
        if kind is tuple:
            if isinstance(value, (list, tuple)) and not any(isinstance(v, (list, dict)) for v in value):
                return tuple(str(v) for v in value)
            if isinstance(value, (list, dict)):
                raise ValueError
            return tuple(shlex.split(str(value)) if _OPTIONS[name].metadata["words"] else str(value).split(","))
        if isinstance(value, (bool, list, dict)):
            raise ValueError
        converted = _integer(value) if kind is int else kind(value)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ConfigError(f"{where}: expected {kind.__name__}, found {value!r}") from None
    choices = _OPTIONS[name].metadata["choices"]
    if choices and converted not in choices:
        raise ConfigError(f"{where}: choose one of {', '.join(choices)}; found {value!r}")
    return converted


def _integer(value: Any) -> int:
    """Accepts 5e8 too, which JSON and YAML do not read as an integer. Raises ValueError."""
    number = int(value) if isinstance(value, int) or str(value).lstrip("+-").isdecimal() else float(value)
    if number != int(number) or abs(number) >= 1 << 63:
        raise ValueError
    return int(number)


def _nearest(name: str) -> str:
    advice = ELSEWHERE.get(name.lstrip("-").replace("_", "-"))
    if advice is not None:
        return f" {advice}"
    close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), _OPTIONS, n=1)
    return f" Did you mean --{close[0].replace('_', '-')}?" if close else " --help lists the options."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """The command line of `hal train`, built from the fields of Config."""
    command = _Parser(
        prog="hal train", description="Trains a GPT.", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    command.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="options by name, or the name of a ready configuration (llama-70b); the command line overrides them. "
        "The sections of MindSpeed-Core-MS and of the MindFormers tutorial are understood too",
    )
    command.add_argument(
        "--deepspeed-config",
        "--deepspeed_config",
        metavar="FILE.json",
        help="DeepSpeed's batch sizes, precision, ZeRO, optimizer and schedule; options given elsewhere must agree",
    )
    group: Any = command
    for option in _OPTIONS.values():
        if option.name in GROUPS:
            group = command.add_argument_group(GROUPS[option.name])
        _add(group, option.name)
    return command


def add_options(group: Any, names: Sequence[str]) -> None:
    """Adds the flags of these options to another command's parser."""
    for name in names:
        _add(group, name)


def _add(group: Any, name: str) -> None:
    option, kind = _OPTIONS[name], _kind(name)
    meta = option.metadata
    flags = [f"--{name.replace('_', '-')}", *(f"--{a}" for a in meta["aliases"])]
    default = "" if option.default in (None, False, ()) else f" (default {option.default})"
    keywords: dict[str, Any] = {"dest": name, "help": (meta["help"] + default).replace("%", "%%")}
    if kind is bool:
        group.add_argument(*flags, action="store_true", **keywords)
        if meta["no"]:
            group.add_argument(
                f"--{meta['no']}", action="store_false", dest=name, help=f"the opposite of --{name.replace('_', '-')}"
            )
    elif kind is tuple:
        split: dict[str, Any] = {"nargs": "+"} if meta["words"] else {"type": lambda text: text.split(",")}
        group.add_argument(*flags, action="extend", **split, metavar="X", **keywords)
    else:
        choices = meta["choices"] or None
        group.add_argument(
            *flags, type=kind, choices=choices, metavar=None if choices else kind.__name__.upper(), **keywords
        )


def _parse_known(argv: Sequence[str]) -> argparse.Namespace:
    namespace, unknown = parser().parse_known_args(list(argv))
    if unknown:
        raise ConfigError(f"there is no option {unknown[0]!r}.{_nearest(unknown[0].split('=')[0])}")
    flags = {a.split("=")[0] for a in argv if a.startswith("--")}
    if {"--use-flash-attn", "--no-flash-attn"} <= flags:
        raise ConfigError("--use-flash-attn and --no-flash-attn contradict each other; give one")
    return namespace
