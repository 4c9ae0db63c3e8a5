"""config.json's values asked for by type, and what the models of Hugging Face that are converted have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import Config
from .weights import Weights, require


class Fields:
    """config.json's values, asked for by type."""

    def __init__(self, values: Mapping[str, Any], where: Path | str) -> None:
        self._values, self._where = values, where

    def part(self, name: str) -> Fields:
        """The object that a field holds; none and null are an empty one."""
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
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 62
        require(good, f"{self._where}: {name} should be a number; found {value!r}")
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


def in_no_model(c: Config) -> list[str]:
    """What neither of the two models has."""
    return [
        *unless(not c.use_sandwich_norm, "--use-sandwich-norm"),
        *unless(c.window == (None, 0), "--pre-tokens and --next-tokens"),
        *unless(not c.noop_layers, "--noop-layers"),
    ]


def unless(fits: bool, what: str) -> list[str]:
    return [] if fits else [what]


def ends(weights: Weights) -> dict[str, int | None]:
    """The id that ends a text, where the vocabulary's own tokenizer is known."""
    if weights.tokenizer.get("tokenizer_type") in (None, "ByteTokenizer", "NullTokenizer", "GPT2BPETokenizer"):
        return {"bos_token_id": weights.vocabulary - 1, "eos_token_id": weights.vocabulary - 1}
    return {"bos_token_id": None, "eos_token_id": None}
