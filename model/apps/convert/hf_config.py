"""Typed access to the fields of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...data.tokenizers.tokenizer import Tokenizer, ends_of
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

    def renamed(self, old: str, new: str) -> Fields:
        """The same values, with that of field `old` also as `new`."""
        return Fields({**self._values, new: self._values[old]}, self._where)

    def get(self, name: str, default: Any) -> Any:
        return self._values.get(name, default)

    def only(self, name: str, allowed: Any, default: Any) -> None:
        value = self._values.get(name, default)
        value = default if value is None and default is not None else value
        require(value in list(allowed), f"{self._where}: {name} = {value!r} has no counterpart in HAL's model")


def ends(weights: Weights) -> dict[str, int | None]:
    """config.json's ids of the first and last token of a text: that which ends documents, if the tokenizer is known."""
    tokenizer = tokenizer_of(weights)
    known = frozenset() if weights.folder is None else ends_of(weights.folder)
    if isinstance(tokenizer, Tokenizer):
        known = frozenset({tokenizer.eod}) if tokenizer.eod in tokenizer.ends else tokenizer.ends
    end = min(known, default=weights.vocabulary - 1)
    unknown = isinstance(tokenizer, str) and bool(weights.tokenizer)
    # Without pad_token_id, some families would have one outside of the vocabulary by default.
    return {
        name: None if unknown or name[0] == "p" else end for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
