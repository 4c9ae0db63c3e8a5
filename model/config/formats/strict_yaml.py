"""YAML for configuration files: plain data, without duplicate keys, and with a limit on what aliases expand to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hal.untrusted import has_own_hash

from ..schema import ConfigError

_LARGEST = 1 << 20
_NODES = 100_000
"""Limit on the number of values after the expansion of aliases, of which few lines can make billions."""
_KEYS = 2000
"""Limit on the number of keys. There are 1,500 names of options, with which each unknown key is compared."""
_LONGEST_NUMBER = 400
"""Characters of a number, of which float64 needs 309 digits. YAML reads 1:30:00 as one, in quadratic time."""


def load(path: Path, shown: str) -> Any:
    """The content of a YAML (or JSON) file. Raises ConfigError with the line for tags and duplicate keys.

    shown: the name of the file in messages.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        count = 0

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            self.count += len(node.value)
            if self.count > _KEYS:
                raise yaml.MarkedYAMLError(problem=f"there are more than {_KEYS} keys", problem_mark=node.start_mark)
            keys = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    continue  # of an anchored mapping, whose keys the mapping's own keys override
                if key.value in keys:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key '{key.value}' is here twice", problem_mark=key.start_mark
                    )
                keys.add(key.value)
                # Larger integers can be chosen to have equal hashes, with which a dictionary takes quadratic time.
                if key.tag == "tag:yaml.org,2002:int" and not has_own_hash(self.construct_object(key)):
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value:.80} is too large", problem_mark=key.start_mark
                    )
            return super().construct_mapping(node, deep)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
            if number and len(node.value) > _LONGEST_NUMBER:
                raise yaml.MarkedYAMLError(
                    problem=f"a number has more than {_LONGEST_NUMBER} characters", problem_mark=node.start_mark
                )
            try:
                return super().construct_object(node, deep)
            # The constructors index the text of a value whose tag is given (!!int "", !!bool x, !!timestamp x).
            except (LookupError, AttributeError, ArithmeticError):
                raise yaml.MarkedYAMLError(
                    problem=f"{node.value!r:.80} is not of the type {node.tag}", problem_mark=node.start_mark
                ) from None

    try:
        with open(path, "rb") as file:
            raw = file.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST >> 20} MiB")
        text = raw.decode("utf-8")
        # JSON allows tabs between values, which YAML does not; within its strings they are escaped.
        loader = Loader(text.replace("\t", " ") if path.suffix == ".json" else text)
        root = loader.get_single_node()
        if root is not None and _expanded(root, {}, set()) > _NODES:
            raise ValueError(f"its aliases expand to more than {_NODES} values")
        return None if root is None else loader.construct_document(root)
    except RecursionError:
        raise ConfigError(f"{shown} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{shown} cannot be read: {' '.join(str(error).split())}") from None


def _expanded(node: Any, sizes: dict[int, int], above: set[int]) -> int:
    """The number of values below a node of the syntax tree, where an alias counts like a copy. Raises ValueError for a
    node that contains itself."""
    if id(node) in above:
        raise ValueError("an alias refers to a value that contains it")
    if id(node) not in sizes:
        pairs = () if isinstance(node.value, str) else node.value
        children = [child for pair in pairs for child in (pair if isinstance(pair, tuple) else (pair,))]
        sizes[id(node)] = 1 + sum(_expanded(child, sizes, above | {id(node)}) for child in children)
    return sizes[id(node)]
