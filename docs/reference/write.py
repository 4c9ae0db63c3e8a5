"""Writes the reference pages of this folder from signatures and docstrings: `python docs/reference/write.py`.

With --check, writes nothing and exits with 1 if a page is not what would be written.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGES = {
    "hal.md": (
        "The contract: `hal`",
        "The names that `import hal` provides. A backend may use only these names, those of [hal.ops](ops.md) and\n"
        "those of [hal.backend_tools](backend_tools.md).",
        ["hal"],
    ),
    "ops.md": (
        "The operations: `hal.ops`",
        "Each op is called as shown and runs on the active backend. The function of the same name in the source\n"
        "defines the op; it is the reference that every backend is compared with. With a tolerance a + r, a result\n"
        "may differ from the exact result z by a + r |z|.",
        ["hal.ops", "hal.ops.layouts", "hal.ops.mappings"],
    ),
    "testing.md": (
        "The kit: `hal.testing`",
        "The names that tests of a backend may use. [The conformance kit](../conformance-kit.md) describes what is\n"
        "checked.",
        ["hal.testing"],
    ),
    "backend_tools.md": (
        "Helpers for backends: `hal.backend_tools`",
        "Optional helpers that every backend with its own kernels would otherwise have to write. A backend may use\n"
        "these names as well as those of [hal](hal.md) and [hal.ops](ops.md).",
        ["hal.backend_tools"],
    ),
}
"""File -> title, introduction, modules."""


def page(title: str, introduction: str, modules: list[str]) -> str:
    """The text of one page."""
    lines = [f"# {title}", "", introduction, "", "This page is generated from the source by `docs/reference/write.py`."]
    for name in modules:
        module = importlib.import_module(name)
        if name != modules[0]:
            lines += ["", f"## Module `{name}`", "", _doc(module)]
        names = [n for n in getattr(module, "__all__", vars(module)) if _is_public(module, n)]
        for public in sorted(names, key=lambda n: (n.isupper(), n.lower())):
            lines += ["", *_entry(module, public)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _is_public(module: ModuleType, name: str) -> bool:
    value = getattr(module, name)
    if name.startswith("_") or isinstance(value, ModuleType):
        return False
    # A module without __all__ shows what it defines.
    return hasattr(module, "__all__") or getattr(value, "__module__", None) == module.__name__ or name.isupper()


def _entry(module: ModuleType, name: str) -> Iterator[str]:
    from hal.core.op import Op

    value = getattr(module, name)
    yield f"### {name}"
    yield ""
    if isinstance(value, Op):
        yield from _op(value)
    elif inspect.isclass(value):
        yield from _class(name, value)
    elif callable(value):
        yield from (_code(_signature(name, value)), "", _doc(value))
    else:
        yield from (_code(f"{name} = {_shown(value)}"), "", _attribute_doc(module, name))


def _op(op: Any) -> Iterator[str]:
    yield _code(_signature(op.name, op.reference))
    yield ""
    yield _doc(op.reference)
    facts = {
        "Gradients": op.grads,
        "Written in place": op.mutates,
        "Hints, which never change a result": op.hints,
        "Composed of": [part.name for part in op.parts],
        "Tolerances": [
            f"{str(dtype).removeprefix('torch.')} {tol.atol:g} + {tol.rtol:g}" for dtype, tol in op.tol.items()
        ],
    }
    yield ""
    yield from (f"- {title}: {', '.join(map(str, values))}" for title, values in facts.items() if values)


def _class(name: str, cls: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    shown = f"class {name}({bases})" if bases else f"class {name}"
    has_constructor = not issubclass(cls, (Exception, enum.Enum)) or "__init__" in vars(cls)
    if has_constructor and not inspect.isabstract(cls) and not getattr(cls, "_is_protocol", False):
        shown += "\n\n" + _signature(name, cls)
    yield _code(shown)
    yield ""
    yield _doc(cls)
    for member, value in vars(cls).items():
        if member.startswith("_"):
            continue
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, property) or type(function).__name__ == "cached_property":
            getter = getattr(function, "fget", None) or getattr(function, "func", None)
            yield from ("", f"**{name}.{member}**", "", _doc(getter))
        elif inspect.isfunction(function):
            yield from ("", _code(_signature(f"{name}.{member}", function)), "", _doc(function))
    if dataclasses.is_dataclass(cls):
        return
    for member, text in _attribute_docs(cls).items():
        if not member.startswith("_"):
            yield from ("", f"**{name}.{member}**", "", text)


def _signature(name: str, function: Any) -> str:
    """The signature as source, with annotations as they are written."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return f"{name}(...)"
    shown: list[str] = []
    for p in signature.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in shown and not any(text.startswith("*") for text in shown):
            shown.append("*")
        text = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        if p.annotation is not p.empty:
            text += f": {_annotation(p.annotation)}"
        if p.default is not p.empty:
            default = "..." if callable(p.default) or " at 0x" in repr(p.default) else _repr(p.default)
            text += (" = " if p.annotation is not p.empty else "=") + default
        shown.append(text)
    returns = signature.return_annotation
    result = "" if returns is signature.empty else f" -> {_annotation(returns)}"
    line = f"{name}({', '.join(shown)}){result}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {text},\n" for text in shown) + f"){result}"


def _repr(value: Any) -> str:
    """The repr, of a set in a fixed order."""
    if isinstance(value, frozenset):
        return f"frozenset({{{', '.join(sorted(map(repr, value)))}}})"
    return repr(value)


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.strip("'").replace("torch.Tensor", "Tensor")


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _shown(value: Any) -> str:
    text = repr(value).replace("'", '"')
    return text if len(text) <= 100 and " at 0x" not in text else "..."


def _doc(value: Any) -> str:
    return inspect.cleandoc(getattr(value, "__doc__", None) or "")


def _attribute_doc(module: ModuleType, name: str) -> str:
    """The docstring below the assignment of `name`, in the module or in one of its package's files."""
    for candidate in [module, *(m for n, m in list(sys.modules.items()) if n.startswith("hal.") and m is not None)]:
        if getattr(candidate, name, None) is getattr(module, name) and (text := _attribute_docs(candidate).get(name)):
            return text
    return ""


def _attribute_docs(owner: Any) -> dict[str, str]:
    """Name -> docstring of the assignments in the source of a module or class that are followed by a string."""
    try:
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    if isinstance(owner, type) and body and isinstance(body[0], ast.ClassDef):
        body = body[0].body
    names = {}
    for statement, following in itertools.pairwise(body):
        text = following.value if isinstance(following, ast.Expr) else None
        if not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names |= {t.id: inspect.cleandoc(text.value) for t in targets if isinstance(t, ast.Name)}
    return names


def main() -> int:
    """Writes or checks the pages."""
    stale = []
    for file, (title, introduction, modules) in PAGES.items():
        text = page(title, introduction, modules)
        path = FOLDER / file
        if "--check" in sys.argv:
            stale += [file] if path.read_text(encoding="utf-8") != text else []
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"docs/reference/{', '.join(stale)}: not what the source says; run: python docs/reference/write.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
