"""The import graph of a tree of files: import statements and calls that import, also inside functions.

Imports below `if TYPE_CHECKING:` are ignored, because they never run. Imports of computed names, such as the commands
that `hal` runs, are ignored too, because the source does not determine which module is imported.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """A file under the name it is imported by. package: where its relative imports start."""

    source: str
    package: str


def modules(root: Path, name: str) -> dict[str, Module]:
    """Every Python file below `root`, which is imported as `name`; symbolic links are not followed.

    Raises FileNotFoundError if there is none, so that no check passes because it has read nothing.
    """
    result = {}
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if any((root / Path(*folders[:n])).is_symlink() for n in range(1, len(folders) + 1)):
            continue
        package = ".".join((name, *folders))
        module = package if path.name == "__init__.py" else f"{package}.{path.stem}"
        result[module] = Module(path.read_text(encoding="utf-8"), package)
    if not result:
        raise FileNotFoundError(f"no Python file below {root}")
    return result


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else node


def imports(module: Module) -> set[str]:
    """Every dotted name that a module imports."""
    names: set[str] = set()
    for node in ast.walk(_WithoutTypeChecking().visit(ast.parse(module.source))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names.update(a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))
    return names


def graph(known: Mapping[str, Module]) -> dict[str, set[str]]:
    """Module -> the modules among `known` that it imports. `from a.b import c` imports a.b.c if that is a module."""

    def longest(name: str) -> str | None:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name or None

    return {
        name: {target for target in map(longest, imports(module)) if target is not None and target != name}
        for name, module in known.items()
    }


def cycle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that form an import cycle, first and last the same; empty if there is no cycle."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])[::-1]
    return []


def against(order: Sequence[str], edges: Mapping[str, Iterable[str]], package: str) -> list[str]:
    """Modules whose part is missing from `order`; if there are none, imports of a later part by an earlier one.

    The parts are the folders and files directly in `package`, which itself is the part "__init__".
    """

    def part(module: str) -> str:
        return module.removeprefix(package).lstrip(".").partition(".")[0] or "__init__"

    inside = [m for m in edges if m == package or m.startswith(package + ".")]
    unknown = [f"{module} has no place in the order" for module in inside if part(module) not in order]
    if unknown:
        return unknown
    return [
        f"{module} imports {target}"
        for module in inside
        for target in sorted(set(edges[module]) & set(inside))
        if order.index(part(target)) > order.index(part(module))
    ]
