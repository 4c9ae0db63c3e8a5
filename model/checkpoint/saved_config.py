"""The options stored in a checkpoint, and which of them define the model, its tokenizer and its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hal import HalError

from ..config import tokenizer_options
from ..config.command_line import convert
from ..config.schema import Config

TOKENIZER = ("tokenizer_type", *tokenizer_options.OPTIONS)


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
