"""Typed access to config.json, and helpers shared by the supported Hugging Face models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config.schema import Config
from .hf_tokenizer import tokenizer_of
from .weights import Weights, require


class Fields:
    """Typed access to the values of a config.json. Methods raise ConversionError for values of another type."""

    def __init__(self, values: Mapping[str, Any], where: Path | str) -> None:
        self._values, self._where = values, where

    def part(self, name: str) -> Fields:
        """The object in a field; a missing field or null is an empty object."""
        value = self._values.get(name)
        require(value is None or isinstance(value, dict), f"{self._where}: {name} should be an object; found {value!r}")
        return Fields(value or {}, f"{self._where}: {name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        value = default if value is None else value
        require(isinstance(value, bool), f"{self._where}: {name} should be true or false; found {value!r}")
        return bool(value)

    def number(self, name: str, default: float | None = None) -> Any:
        value = self._values.get(name, default)
        value = default if value is None else value
        valid = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 62
        require(valid, f"{self._where}: {name} should be a number; found {value!r}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        require(isinstance(value, int) and value > 0, f"{self._where}: {name} should be a count; found {value!r}")
        return int(value)

    def get(self, name: str, default: Any) -> Any:
        return self._values.get(name, default)

    def only(self, name: str, allowed: Any, default: Any) -> None:
        value = self._values.get(name, default)
        require(value in list(allowed), f"{self._where}: {name} = {value!r} has no counterpart in HAL's model")


def unsupported_options(c: Config) -> list[str]:
    """Options of the config that neither GPT-2 nor Llama has."""
    return [
        *unless(not c.use_sandwich_norm, "--use-sandwich-norm"),
        *unless(c.window == (None, 0), "--pre-tokens and --next-tokens"),
        *unless(not c.noop_layers, "--noop-layers"),
        *unless(not c.qk_layernorm, "--qk-layernorm"),
        *unless(not c.squared_relu, "--squared-relu"),
        *unless(not c.use_rope_scaling, "--use-rope-scaling"),
    ]


def unless(supported: bool, option: str) -> list[str]:
    """The option as a list of reasons against a conversion, unless it is supported."""
    return [] if supported else [option]


def ends(weights: Weights) -> dict[str, int | None]:
    """config.json's ids of the first and last token of a text: that which ends documents, if the tokenizer is known."""
    tokenizer = tokenizer_of(weights)
    end = weights.vocabulary - 1 if isinstance(tokenizer, str) else tokenizer.eod
    unknown = isinstance(tokenizer, str) and bool(weights.tokenizer)
    return {"bos_token_id": None, "eos_token_id": None} if unknown else {"bos_token_id": end, "eos_token_id": end}
