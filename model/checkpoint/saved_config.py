"""The options stored in a checkpoint, and which of them define the model, its tokenizer and its data."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hal import HalError
from hal.untrusted import shown

from ..config import tokenizer_options
from ..config.command_line import convert
from ..config.schema import Config, ConfigError, GivenOptions
from .reader import candidates, folder_of, read_manifest

TOKENIZER = ("tokenizer_type", *tokenizer_options.OPTIONS)

_SHAPES = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")


def data_options() -> list[str]:
    """Names of the options that define the data of a run."""
    names = [f.name for f in fields(Config)]
    return names[names.index("data_path") : names.index("tokenizer_type")]


def model_options() -> list[str]:
    """Names of the options that define a model."""
    names = [f.name for f in fields(Config)]
    return [*names[names.index("num_layers") : names.index("data_path")], "bf16", "fp16", "noop_layers"]


def saved_options(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options stored in a checkpoint, without those at their defaults. Raises HalError for unknown options."""
    known = {f.name: f for f in fields(Config)}
    stored = state.get("config")
    if not isinstance(stored, dict):
        raise HalError(f"the checkpoint {folder} does not contain the options of its model")
    unknown = sorted(set(stored) - set(known))
    if unknown:
        raise HalError(f"the checkpoint {folder} was written by another version of HAL, with the options {unknown}")
    padded = stored.get("padded_vocab_size")
    if padded is not None and (type(padded) is not int or padded < 1):
        raise HalError(f"the checkpoint {folder}: padded_vocab_size should be a count; found {padded!r}")
    where = f"the checkpoint {folder}: --"
    values = {n: v for n, v in stored.items() if known[n].init and v != known[n].default}
    values = {n: convert(n, v, where + n.replace("_", "-")) for n, v in values.items()}
    return {n: v for n, v in values.items() if v != known[n].default}


def saved_vocabulary(state: Mapping[str, Any], folder: Path) -> int | None:
    """The rows of a checkpoint's embedding without padding; None if it does not say. Raises HalError for another
    value."""
    stored = state.get("config")
    count = stored.get("vocabulary") if isinstance(stored, dict) else None
    if count is not None and (type(count) is not int or count < 1):
        raise HalError(f"the checkpoint {folder}: vocabulary should be a count of rows; found {shown(count)}")
    return count


def adopt(values: GivenOptions) -> None:
    """Adds the model and the tokenizer of the checkpoint in --load to the options, as Megatron's --use-checkpoint-args.

    Options that the user gave stay, and a note names those that differ. Does nothing if there is no checkpoint. Raises
    ConfigError for sizes that contradict it (other contradictions are refused when it is loaded), HalError for unknown
    options in it.
    """
    found = None if "load" not in values else _newest(Path(values["load"]))
    if found is None:
        return
    folder, state = found
    saved = saved_options(state, folder)
    if "tokenizer_type" in values:
        saved = {n: v for n, v in saved.items() if n not in TOKENIZER}
    if {"bf16", "fp16"} & set(values):
        saved = {n: v for n, v in saved.items() if n not in ("bf16", "fp16")}
    saved = {n: v for n, v in saved.items() if n in {*model_options(), *TOKENIZER}}
    if "make_vocab_size_divisible_by" not in values and state["config"].get("padded_vocab_size"):
        # The embedding's rows are the checkpoint's, also if its tokenizer has fewer ids than those of another one.
        saved["pad_vocab_size_to"] = state["config"]["padded_vocab_size"]
        saved.pop("make_vocab_size_divisible_by", None)
    for name in _SHAPES:
        value = state["config"].get(name)
        if name in values and values[name] != value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} {values[name]} contradicts the checkpoint {folder}, whose model has {value}; remove {option}"
            )
    for name, value in saved.items():
        if name not in values:
            values.take({name: value}, {name: f"the checkpoint {folder}"})
            values.adopted.add(name)
        elif values[name] != value:
            option = f"--{name.replace('_', '-')}"
            values.notes.append(f"{option} {values[name]} is given; the checkpoint {folder} was made with {value}")


def _newest(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """(folder, state) of the checkpoint that would be tried first and has a readable manifest; None without any."""
    for iteration in candidates(root):
        with contextlib.suppress(HalError, OSError):
            return folder_of(root, iteration), read_manifest(folder_of(root, iteration))["state"]
    return None
