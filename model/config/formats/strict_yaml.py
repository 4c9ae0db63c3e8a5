"""YAML for configuration files: plain data, without anchors (which allow unlimited expansion) and duplicate keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..schema import ConfigError

_LARGEST = 1 << 20


def load(path: Path, shown: str) -> Any:
    """The content of a YAML (or JSON) file. Raises ConfigError with the line for tags, anchors and duplicate keys.

    shown: the name of the file in messages.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise yaml.MarkedYAMLError(problem="anchors and aliases are not taken", problem_mark=event.start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = set()
            for key, _ in node.value:
                if key.value in keys or key.tag == "tag:yaml.org,2002:merge":
                    raise yaml.MarkedYAMLError(
                        problem=f"the key '{key.value}' is here twice", problem_mark=key.start_mark
                    )
                keys.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        with open(path, "rb") as file:
            raw = file.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST >> 20} MiB")
        return yaml.load(raw.decode("utf-8"), Loader)
    except RecursionError:
        raise ConfigError(f"{shown} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{shown} cannot be read: {' '.join(str(error).split())}") from None
