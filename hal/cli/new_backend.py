"""`hal new-backend NAME`: writes an installable package that adds a backend, to be extended op by op.

The package is complete: it can be installed, `hal info` lists it, and its one op passes the conformance kit. Nothing is
written to an existing folder.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from hal.core.backend import API
from hal.core.registry import backend_names
from hal.errors import HalError

from .arguments import Parser

FILES = {
    "setup.cfg": "setup.cfg",
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    ".github/workflows/check.yml": "check.yml",
    "hal_acme/__init__.py": "init.py",
    "hal_acme/device.py": "device.py",
    "hal_acme/norm.py": "norm.py",
    "tests/test_acme.py": "test.py",
}
"""Path in the new package -> template. Templates are written for a backend called acme."""


def parser() -> Parser:
    """The options of `hal new-backend`."""
    command_parser = Parser("new-backend", description="Writes an installable package that adds a backend.")
    command_parser.add_argument(
        "name", metavar="NAME", help="name for --backend: lower-case letters, digits, underscores"
    )
    command_parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to create the folder hal-NAME (default: here)"
    )
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Runs `hal new-backend` with these arguments."""
    arguments = parser().parse_args(argv)
    root = write(arguments.name, arguments.dir)
    print(f"wrote {root}, a backend called {arguments.name}. Next:")
    for step in (
        f"cd {root}",
        'python -m pip install -e ".[test]"',
        f"hal doctor --backend {arguments.name}",
        f"hal parity --backend {arguments.name} --todo",
    ):
        print(f"  {step}")
    print("docs/write-a-backend.md describes all steps from there to training a GPT.")
    return 0


def write(name: str, folder: Path) -> Path:
    """Writes the package for a backend called `name` into `folder`/hal-NAME and returns that path.

    Raises HalError for a name that cannot be used, or if the path exists.
    """
    _check_name(name)
    root = folder / f"hal-{name.replace('_', '-')}"
    if root.exists():
        raise HalError(f"{root} exists and is not overwritten; choose another --dir or NAME, or remove it first")
    templates = files(__package__) / "template"
    for path, template in FILES.items():
        text = (templates / f"{template}.template").read_text(encoding="utf-8")
        target = root / _named(path, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_named(text, name), encoding="utf-8")
    return root


def _named(text: str, name: str) -> str:
    text = text.replace("hal-acme", f"hal-{name.replace('_', '-')}").replace("$api", str(API))
    return text.replace("Acme", _class_name(name)).replace("acme", name)


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise HalError(
            f"'{name}' cannot name a backend: use lower-case letters, digits and single underscores, a letter first, "
            f"no Python keyword (for example: acme, my_chip2)"
        )
    if name in (*backend_names(), "reference", "spy"):
        source = backend_names().get(name, "part of the conformance kit")
        raise HalError(f"a backend called '{name}' exists already ({source}); choose another name")
