"""Who names what: every dotted name that a Python source refers to, found in its syntax tree.

Aliases are followed (`import torch as t`, `from torch import cuda as c`, `m = torch`), as are `getattr` of a constant,
`importlib.import_module`, `__import__` and `sys.modules[...]`. `violations` holds a source against a `Rule`; HAL's own
tests use it to keep the model free of devices and backends free of HAL's private names, and so can a third party's.
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
class Reference:
    """One mention of a dotted name, with its line. imported: by an import statement or an importing call."""

    line: int
    name: str
    imported: bool


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
    """What a source must not do.

    forbidden: dotted names, with everything below them. allowed: if given, asked of every name below `hal` that is not
    forbidden. devices: device strings ("cuda", f"npu:{i}") and device attributes (x.cuda(), x.is_npu) are violations.
    dynamic: imports of computed names are violations.
    """

    forbidden: Sequence[str] = ()
    allowed: Callable[[str], bool] | None = None
    devices: bool = False
    dynamic: bool = False


def public(name: str) -> bool:
    """Whether a dotted name below hal is exported: hal.X with X in hal.__all__, or hal.ops.Y with Y in hal.ops's."""
    import hal
    from hal import ops

    _, first, *rest = name.split(".")
    if first != "ops":
        return first in hal.__all__ or first == "__version__"
    return not rest or rest[0] in ops.__all__


def backend_rule(package: str) -> Rule:
    """The rule of a backend in `package`: of hal, only what `public` says, and its own modules."""
    return Rule(allowed=lambda name: name == package or name.startswith(package + ".") or public(name))


def violations(source: str, rule: Rule, *, package: str = "", file: str = "<source>") -> list[Violation]:
    """Every line of `source` (a module of `package`, which relative imports start from) that breaks the rule."""
    tree = ast.parse(source, file)
    found = {(line, text) for line, text in _broken(tree, rule, package)}
    return [Violation(file, line, text) for line, text in sorted(found)]


def check_tree(root: Path, rule: Rule, *, package: str) -> list[Violation]:
    """`violations` of every Python file below `root`, which is imported as `package`.

    Raises FileNotFoundError if there is none: a check of nothing proves nothing.
    """
    found = []
    paths = sorted(root.rglob("*.py"))
    if not paths:
        raise FileNotFoundError(f"no Python file below {root}")
    for path in paths:
        inner = path.relative_to(root).parent.parts
        source = path.read_text(encoding="utf-8")
        found += violations(source, rule, package=".".join((package, *inner)), file=str(path))
    return found


def _broken(tree: ast.AST, rule: Rule, package: str) -> Iterator[tuple[int, str]]:
    for reference in references(tree, package):
        name = reference.name
        hit = next((f for f in rule.forbidden if name == f or name.startswith(f + ".")), None)
        if hit is not None:
            yield reference.line, f"refers to {hit}"
        elif name == DYNAMIC:
            if rule.dynamic:
                yield reference.line, "imports a computed name"
        elif rule.allowed is not None and name.startswith("hal.") and not rule.allowed(name):
            yield reference.line, f"refers to {name}, which is private"
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


def references(tree: ast.AST, package: str = "") -> list[Reference]:
    """Every dotted name the tree refers to. Scopes are not told apart: an alias counts in the whole file."""
    names = _Names(package)
    for _ in range(2):  # a second time for aliases of aliases that are defined further down
        for node in ast.walk(tree):
            names.learn(node)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Reference(node.lineno, alias.name, True) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = names.base(node)
            found += [Reference(node.lineno, f"{base}.{alias.name}".removesuffix(".*"), True) for alias in node.names]
        elif isinstance(node, ast.expr):
            name = names.resolve(node)
            if name is not None:
                found.append(Reference(node.lineno, name, isinstance(node, ast.Call)))
    return found


class _Names:
    """What names of a file stand for."""

    def __init__(self, package: str) -> None:
        self.package = package.split(".") if package else []
        self.known: dict[str, str] = {"__import__": "builtins.__import__", "getattr": "builtins.getattr"}

    def base(self, node: ast.ImportFrom) -> str:
        """The absolute module that a from-import starts from."""
        up = self.package[: len(self.package) - node.level + 1] if node.level else []
        return ".".join([*up, *([node.module] if node.module else [])])

    def learn(self, node: ast.AST) -> None:
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
        """The dotted name an expression stands for, if it stands for one."""
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
    """The text of a constant string, also of a sum of constants; of an f-string, with {} for what is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_constant(v) or "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _constant(node.left), _constant(node.right)
        return None if left is None or right is None else left + right
    return None
