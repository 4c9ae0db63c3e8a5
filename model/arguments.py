"""From the command line, a YAML file and the environment to a Config: the command line wins, the environment loses.

YAML keys and environment variables are the flags' names (`num-layers` or `num_layers`; `HAL_NUM_LAYERS`). An unknown
name is an error that offers the nearest valid one.
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

from .checks import check
from .config import Config, ConfigError, ready_configuration

GROUPS = {
    "backend": "where it runs",
    "num_layers": "the model",
    "data_path": "data",
    "micro_batch_size": "training",
    "tensor_model_parallel_size": "parallel dimensions",
    "save": "checkpoints, evaluation, logging",
}
"""Titles in --help, by the first option of each group."""

_TYPES = typing.get_type_hints(Config)
_OPTIONS = {f.name: f for f in fields(Config) if f.init}
_SPELLINGS = {
    spelling: name
    for name, option in _OPTIONS.items()
    for spelling in (name.replace("_", "-"), *option.metadata["aliases"], option.metadata["no"])
    if spelling
}
"""Field names by every spelling of their flags, without the leading dashes."""


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    """The checked Config of a command line. Raises ConfigError; exits for --help."""
    return build(read(argv, environ))


def read(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Option values by field name, from all three places. Raises ConfigError; exits for --help."""
    namespace = vars(_parse_known(argv))
    path = namespace.pop("config", None)
    values = _environment(os.environ if environ is None else environ)
    if path is not None:
        values.update(read_yaml(path))
    values.update({name: tuple(v) if isinstance(v, list) else v for name, v in namespace.items()})
    return values


def build(values: Mapping[str, Any], check: Callable[[Config], None] = check) -> Config:
    """A checked Config from option values by field name; what is in `values` counts as given by the user."""
    for name in values:
        if name not in _OPTIONS:
            raise ConfigError(f"there is no option '{name}'.{_nearest(name)}")
    config = Config(**values)
    config.given = frozenset(values)
    check(config)
    return config


def read_yaml(path: str) -> dict[str, Any]:
    """Option values by field name, from a file or the ready configuration of that name.

    Raises ConfigError for what is not a flat mapping of known options.
    """
    import yaml

    named = Path(path).name == path and not path.endswith((".yaml", ".yml"))
    file = ready_configuration(path) if named else Path(path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold `option: value` lines; it holds {type(content).__name__}")
    values: dict[str, Any] = {}
    for key, value in content.items():
        spelled, where = str(key).replace("_", "-"), f"--config {path}: {key}"
        name = _SPELLINGS.get(spelled)
        if name is None:
            raise ConfigError(f"--config {path}: there is no option '{key}'.{_nearest(spelled)}")
        if name in values:
            raise ConfigError(f"--config {path} sets '{name}' twice")
        converted = _convert(name, value, where)
        values[name] = not converted if spelled == _OPTIONS[name].metadata["no"] else converted
    return values


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found = {name: environ.get(f"HAL_{name.upper()}") for name in _OPTIONS}
    return {name: _convert(name, text, f"HAL_{name.upper()}") for name, text in found.items() if text}


def _kind(name: str) -> type:
    hint = _TYPES[name]
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not types.NoneType)
    return tuple if typing.get_origin(hint) is tuple else hint


def _convert(name: str, value: Any, where: str) -> Any:
    """`value` as the option's type. YAML reads 1e-3 as a string, and the environment holds nothing else."""
    kind = _kind(name)
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[str(value).lower()]
        if kind is tuple:
            if isinstance(value, list) and not any(isinstance(v, (list, dict)) for v in value):
                return tuple(str(v) for v in value)
            if isinstance(value, (list, dict)):
                raise ValueError
            return tuple(shlex.split(str(value)) if _OPTIONS[name].metadata["words"] else str(value).split(","))
        if isinstance(value, bool) or (kind is int and isinstance(value, float)) or isinstance(value, (list, dict)):
            raise ValueError
        converted = kind(value)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{where}: expected {kind.__name__}, found {value!r}") from None
    choices = _OPTIONS[name].metadata["choices"]
    if choices and converted not in choices:
        raise ConfigError(f"{where}: choose one of {', '.join(choices)}; found {value!r}")
    return converted


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), _OPTIONS, n=1)
    return f" Did you mean --{close[0].replace('_', '-')}?" if close else " `hal train --help` lists the options."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """The command line of `hal train`, made from the Config's fields."""
    made = _Parser(
        prog="hal train", description="Trains a GPT.", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    made.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="options by name, or the name of a ready configuration (llama-70b); the command line wins over them",
    )
    group: Any = made
    for option in _OPTIONS.values():
        if option.name in GROUPS:
            group = made.add_argument_group(GROUPS[option.name])
        _add(group, option.name)
    return made


def add_options(group: Any, names: Sequence[str]) -> None:
    """Adds the flags of these options to the command line of another command; those not given are left out of it."""
    for name in names:
        _add(group, name)


def _add(group: Any, name: str) -> None:
    option, kind = _OPTIONS[name], _kind(name)
    meta = option.metadata
    flags = [f"--{name.replace('_', '-')}", *(f"--{a}" for a in meta["aliases"])]
    default = "" if option.default in (None, False, ()) else f" (default {option.default})"
    how: dict[str, Any] = {"dest": name, "help": (meta["help"] + default).replace("%", "%%")}
    if kind is bool:
        group.add_argument(*flags, action="store_true", **how)
        if meta["no"]:
            group.add_argument(f"--{meta['no']}", action="store_false", dest=name, help="the opposite")
    elif kind is tuple:
        several: dict[str, Any] = {"action": "extend", "nargs": "+"} if meta["words"] else {"action": "append"}
        group.add_argument(*flags, **several, metavar="X", **how)
    else:
        choices = meta["choices"] or None
        group.add_argument(
            *flags, type=kind, choices=choices, metavar=None if choices else kind.__name__.upper(), **how
        )


def _parse_known(argv: Sequence[str]) -> argparse.Namespace:
    namespace, unknown = parser().parse_known_args(list(argv))
    if unknown:
        raise ConfigError(f"there is no option {unknown[0]!r}.{_nearest(unknown[0].split('=')[0])}")
    flags = {a.split("=")[0] for a in argv if a.startswith("--")}
    if {"--use-flash-attn", "--no-flash-attn"} <= flags:
        raise ConfigError("--use-flash-attn and --no-flash-attn contradict each other; give one")
    return namespace
