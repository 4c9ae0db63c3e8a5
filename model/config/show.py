"""`hal config show`: the merged configuration with the origin of every value, as YAML that --config can read.

Options that the user gave are written as YAML values; defaults, derived values and those of the checkpoint in --load
are comments. Reading the text back therefore gives the same run with the same options marked as given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from .schema import Config
from .validation import lacking, missing_processes, world_size


def describe(config: Config, groups: dict[str, str], *, defaults: bool = True) -> Iterator[str]:
    """The lines of the text. groups: titles by the first option of each group; defaults: whether options that the user
    did not give are listed."""
    options = [f for f in fields(config) if f.init]
    width = max(len(f.name) for f in options) + 32
    title = ""
    for option in options:
        name, value = option.name, getattr(config, option.name)
        if name in groups:
            title = f"\n# {groups[name]}" if option is not options[0] else f"# {groups[name]}"
        if not defaults and name not in config.given:
            continue
        if title:
            yield title
            title = ""
        if name in config.given:
            line, origin = f"{name.replace('_', '-')}: {_text(value)}", config.origins.get(name, "given")
        else:
            line = f"# {name.replace('_', '-')}: {_text(value)}"
            origin = config.origins.get(name) or ("default" if value == option.default else "derived")
        yield f"{line:<{width}}  # {origin}"
    if config.notes:
        yield "\n# notes"
        yield from (f"# {note}" for note in config.notes)
    if config.noted:
        yield "\n# accepted, without effect"
        yield from (f"# {flag}: {reason}" for flag, reason in config.noted.items())
    needed, missing = list(lacking(config)), missing_processes(config)
    if missing:
        needed.append(f"processes: at least {world_size(config) + missing}, by --nproc-per-node or a launcher")
    if needed:
        yield "\n# still to be given"
        yield from (f"# {need}" for need in needed)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)
