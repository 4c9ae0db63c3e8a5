"""Lists every dotted name that a Python source refers to, from its syntax tree, and checks the names against a rule.

Aliases are followed (`import torch as t`, `from torch import cuda as c`, `m = torch`), as are `getattr` of a constant,
`importlib.import_module`, `__import__` and `sys.modules[...]`. HAL's tests use `violations` to keep the model free of
devices and backends free of HAL's private names; so can the tests of a third party.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DYNAMIC = "<computed name>"
"""The name given to an import whose argument is not a constant."""

DEVICES = ("cuda", "npu", "xpu", "hpu", "mps", "mlu", "musa", "hip")

_DEVICE_STRING = re.compile(rf"({'|'.join(DEVICES)})(:.*)?", re.DOTALL)
_DEVICE_ATTRIBUTES = {*DEVICES, *(f"is_{d}" for d in DEVICES)}


@dataclass(frozen=True)
class Violation:
    """A line that breaks a rule."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Rule:
    """Restrictions on a source.

    forbidden: dotted names, with everything below them. allowed: if given, called with every name below `hal` that is
    not forbidden; False is a violation. devices: device strings ("cuda", f"npu:{i}") and device attributes (x.cuda(),
    x.is_npu) are violations. dynamic: imports of computed names are violations.
    """

    forbidden: Sequence[str] = ()
    allowed: Callable[[str], bool] | None = None
    devices: bool = False
    dynamic: bool = False


def public(name: str) -> bool:
    """Whether a dotted name below hal is exported: hal.X with X in hal.__all__, or hal.M.Y with Y in M's, M being ops
    or backend_tools."""
    import hal
    from hal import backend_tools, ops

    _, first, *rest = name.split(".")
    module = {"ops": ops, "backend_tools": backend_tools}.get(first)
    if module is None:
        return first in hal.__all__ or first == "__version__"
    return not rest or rest[0] in module.__all__


def backend_rule(package: str) -> Rule:
    """The rule of a backend in `package`: below hal, it may refer to public names and to its own modules only."""
    return Rule(allowed=lambda name: name == package or name.startswith(package + ".") or public(name))


def violations(source: str, rule: Rule, *, package: str = "", file: str = "<source>") -> list[Violation]:
    """Every line of `source` (a module of `package`, to which relative imports are relative) that breaks the rule."""
    tree = ast.parse(source, file)
    return [Violation(file, line, text) for line, text in sorted(set(_violating_lines(tree, rule, package)))]


def check_tree(root: Path, rule: Rule, *, package: str) -> list[Violation]:
    """`violations` of every Python file below `root`, which is imported as `package`.

    Raises FileNotFoundError if there is no file, because such a check would pass with every rule.
    """
    result = []
    paths = sorted(root.rglob("*.py"))
    if not paths:
        raise FileNotFoundError(f"no Python file below {root}")
    for path in paths:
        inner = path.relative_to(root).parent.parts
        source = path.read_text(encoding="utf-8")
        result += violations(source, rule, package=".".join((package, *inner)), file=str(path))
    return result


def _violating_lines(tree: ast.AST, rule: Rule, package: str) -> Iterator[tuple[int, str]]:
    for line, name in references(tree, package):
        forbidden = next((f for f in rule.forbidden if name == f or name.startswith(f + ".")), None)
        if forbidden is not None:
            yield line, f"refers to {forbidden}"
        elif name == DYNAMIC:
            if rule.dynamic:
                yield line, "imports a computed name"
        elif rule.allowed is not None and name.startswith("hal.") and not rule.allowed(name):
            yield line, f"refers to {name}, which is private"
    if rule.devices:
        yield from _devices(tree)


def _devices(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _DEVICE_ATTRIBUTES:
            yield node.lineno, f"uses the device attribute .{node.attr}"
        if isinstance(node, ast.expr):
            text = _constant(node)
            if text is not None and _DEVICE_STRING.fullmatch(text):
                yield node.lineno, f"names the device {text!r}"


def references(tree: ast.AST, package: str = "") -> list[tuple[int, str]]:
    """(line, dotted name) of all references in the tree. Scopes are ignored: an alias is valid in the entire file."""
    names = _Names(package)
    for _ in range(2):  # the second pass resolves aliases of aliases that are defined further down
        for node in ast.walk(tree):
            names.learn(node)
    result = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            result += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = names.base(node)
            result += [(node.lineno, f"{base}.{alias.name}".removesuffix(".*")) for alias in node.names]
        elif isinstance(node, ast.expr):
            name = names.resolve(node)
            if name is not None:
                result.append((node.lineno, name))
    return result


class _Names:
    """The dotted names that the names of a file are bound to."""

    def __init__(self, package: str) -> None:
        self.package = package.split(".") if package else []
        self.known: dict[str, str] = {"__import__": "builtins.__import__", "getattr": "builtins.getattr"}

    def base(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module that a from-import imports from."""
        up = self.package[: len(self.package) - node.level + 1] if node.level else []
        return ".".join([*up, *([node.module] if node.module else [])])

    def learn(self, node: ast.AST) -> None:
        """Records the names that an import or an assignment binds."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.known[alias.asname or alias.name] = f"{self.base(node)}.{alias.name}"
        elif isinstance(node, ast.Assign):
            name = self.resolve(node.value)
            for target in node.targets:
                if name is not None and isinstance(target, ast.Name):
                    self.known[target.id] = name

    def resolve(self, node: ast.expr) -> str | None:
        """The dotted name that an expression refers to, None if it is something else."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        if isinstance(node, ast.Subscript) and self.resolve(node.value) == "sys.modules":
            return _constant(node.slice)
        if not isinstance(node, ast.Call) or not node.args:
            return None
        function = self.resolve(node.func)
        if function in ("importlib.import_module", "builtins.__import__"):
            return _constant(node.args[0]) or DYNAMIC
        if function == "builtins.getattr" and len(node.args) > 1:
            owner, attribute = self.resolve(node.args[0]), _constant(node.args[1])
            return None if owner is None else f"{owner}.{attribute or DYNAMIC}"
        return None


def _constant(node: ast.expr) -> str | None:
    """The text of a constant string or of a sum of them; of an f-string, with {} in place of computed parts."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_constant(v) or "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _constant(node.left), _constant(node.right)
        return None if left is None or right is None else left + right
    return None
