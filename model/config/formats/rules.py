"""Front ends: a rule for every dotted key of another system's configuration, which maps the key to HAL's options."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hal.untrusted import shown

from ..schema import ConfigError, collecting

MICROBATCHES = "@microbatches"
"""A pseudo-option: microbatches per step and replica, which determine the global batch size."""


@dataclass
class Reading:
    """The state of translating one file.

    values: options by name (and MICROBATCHES); origins: the key that set each of them; notes: keys without effect in
    HAL. convert(option, value, where) checks a value's type.

    problems: what is wrong, collected; noted: accepted options without effect, with the reason, by their flag; base:
    options given elsewhere, which translations may depend on; superseded: those that a translation replaces.
    """

    file: str
    convert: Callable[[str, Any, str], Any]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)
    noted: dict[str, str] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    superseded: set[str] = field(default_factory=set)

    def either(self, option: str) -> Any:
        """The value of an option in this file, or else where it was given elsewhere, or None."""
        return self.values.get(option, self.base.get(option))

    def set(self, option: str, value: Any, key: str) -> None:
        """Sets an option. Raises ConfigError if another key of the file set it to another value."""
        if value is None:
            return
        where = f"{self.file}: {key}"
        value = int_of(value, where) if option == MICROBATCHES else self.convert(option, value, where)
        if option in self.values and self.values[option] != value:
            raise ConfigError(
                f"{where} and {self.origins[option]} contradict each other about {flag(option)}: {value!r} and "
                f"{self.values[option]!r}"
            )
        self.values[option], self.origins[option] = value, key

    def drop_deferred(self) -> None:
        """Removes deferred values that no step has taken because it ended with a problem."""
        for name in [n for n in self.values if n.startswith("@") and n != MICROBATCHES]:
            del self.values[name], self.origins[name]

    def note(self, key: str, text: str) -> None:
        """Records a note to the user about an accepted key."""
        self.notes.append(f"{self.file}: {key}: {text}")

    def refuse(self, key: str, text: str, kind: str = "refused") -> ConfigError:
        """The error for a key whose value HAL does not support."""
        return ConfigError(f"{self.file}: {key}: {text}", kind)


Rule = Callable[[Reading, str, Any], None]
"""Called with the reading, a key and its value."""


def load_rules(
    path: Path, tables: Mapping[str, Mapping[Any, Any]] | None = None, functions: Mapping[str, Rule] | None = None
) -> dict[str, Rule]:
    """The rules of a front end by key, read from its YAML file; mindspeed.yaml describes the kinds of entries.

    tables: choices that entries refer to by name. functions: rules that are implemented as functions.
    """
    import yaml

    def rule(entry: Any) -> Rule:
        if isinstance(entry, str):
            return to(entry)
        if "function" in entry:
            return (functions or {})[entry["function"]]
        if "choices" in entry:
            table = entry["choices"]
            return choices(entry["option"], (tables or {})[table] if isinstance(table, str) else table)
        if "option" in entry:
            return to(entry["option"])
        if "only" in entry:
            return only(entry["only"], entry["why"])
        if "note" in entry:
            return note(entry["note"], entry.get("unless", ()))
        return defer(entry["defer"])

    return {key: rule(entry) for key, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items()}


def to(option: str) -> Rule:
    """The key sets this option."""
    return lambda reading, key, value: reading.set(option, value, key)


def choices(option: str, table: Mapping[Any, Any]) -> Rule:
    """Maps each value of the key, in upper or lower case, to a value of the option or to several options."""
    words = {_lower(word): meant if isinstance(meant, Mapping) else {option: meant} for word, meant in table.items()}

    def rule(reading: Reading, key: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, (str, bool, int)) or _lower(value) not in words:
            raise reading.refuse(key, f"{value!r} is not one of {', '.join(map(str, table))} (it sets {flag(option)})")
        for name, meant in words[_lower(value)].items():
            reading.set(name, meant, key)

    return rule


def only(allowed: Sequence[Any], why: str) -> Rule:
    """Accepts the values that match HAL's behaviour; others are refused, since results would differ."""

    def rule(reading: Reading, key: str, value: Any) -> None:
        # 1 == True in Python, so the types are compared as well.
        if value is not None and not any(_lower(value) == _lower(a) and type(value) is type(a) for a in allowed):
            given = shown(value) if isinstance(value, dict) else repr(value)
            raise reading.refuse(key, f"{given} cannot be followed: {why}")

    return rule


def note(text: str, unless: Sequence[Any]) -> Rule:
    """The key does not change results in HAL; the user gets a note, unless the value matches HAL's behaviour."""

    def rule(reading: Reading, key: str, value: Any) -> None:
        if value is not None and value not in unless:
            given = "" if isinstance(value, (dict, list)) else f"{value!r} "
            reading.note(key, f"{given}has no effect: {text}")

    return rule


def defer(name: str) -> Rule:
    """Keeps the value under this name until the entire file has been read; `take` returns it."""

    def rule(reading: Reading, key: str, value: Any) -> None:
        if value is not None:
            reading.values[f"@{name}"], reading.origins[f"@{name}"] = value, key

    return rule


def take(reading: Reading, name: str) -> tuple[Any, str]:
    """A deferred value and its key; (None, "") if the file does not have it."""
    return reading.values.pop(f"@{name}", None), reading.origins.pop(f"@{name}", "")


def translate(reading: Reading, content: Any, rules: Mapping[str, Rule]) -> None:
    """Applies the rules to every key of a nested mapping, and collects problems, such as keys without a rule."""
    known = set(rules)
    folders = {key[:at] for key in known for at in range(len(key)) if key[at] == "."}

    def walk(node: Mapping[Any, Any], path: str) -> None:
        for name, value in node.items():
            key = f"{path}{name}"
            if key in known:
                with collecting(reading.problems):
                    rules[key](reading, key, value)
            elif key in folders and (value is None or isinstance(value, dict)):
                walk(value or {}, f"{key}.")
            elif key in folders:
                reading.problems.append(reading.refuse(key, f"holds keys; found {value!r}", "wrong"))
            else:
                hint = nearest_key(key, known | folders)
                reading.problems.append(reading.refuse(key, f"there is no such key.{hint}", "unknown"))

    walk(content, "")


def nearest_key(key: str, known: set[str]) -> str:
    """A suggestion for an unknown key: the same name in another section, or a similar one."""
    last = key.rsplit(".", 1)[-1]
    same = sorted(k for k in known if k.rsplit(".", 1)[-1] == last)
    close = same or difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""


def flag(option: str) -> str:
    """An option as users type it."""
    return "--" + option.replace("_", "-")


def int_of(value: Any, where: str) -> int:
    """A positive integer. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: expected a positive integer, found {value!r}")
    return value


def number_of(value: Any, where: str) -> float:
    """A number; YAML reads 1e-5 as text. Raises ConfigError."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: expected a number, found {value!r}") from None


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value
