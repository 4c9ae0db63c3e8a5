"""Counts this backend's lines of code, per op and outside of ops, for the README.

`python cost.py` prints the tables, `python cost.py --write` writes them to README.md; a test checks that they are up to
date. Blank lines, comments and docstrings are not counted.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE / "hal_opencl"
KERNELS = PACKAGE / "kernels"
SHARED = ("reduce",)
"""Kernel files that do not belong to an op."""
HELPERS = {"attention": ("attention", "rows")}
"""Kernel files of modules that use others than the file of the same name."""


def python_lines(path: Path) -> int:
    """Lines of code of a Python file."""
    text = path.read_text()
    lines = {i for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def kernel_lines(path: Path) -> int:
    """Lines of code of a kernel file."""
    return sum(1 for line in path.read_text().splitlines() if line.strip() and not line.strip().startswith("//"))


def ops_of(path: Path) -> list[str]:
    """The ops that a module implements."""
    return re.findall(r"^@?OpenCL\.impl\(ops\.(\w+)", path.read_text(), re.MULTILINE)


def table() -> str:
    """The README's two tables."""
    rows = ["| ops | Python | OpenCL C | lines per op |", "|---|---:|---:|---:|"]
    outside = ["| outside of ops | lines |", "|---|---:|"]
    totals, count, rest = [0, 0], 0, 0
    for path in sorted(PACKAGE.glob("*.py")):
        ops, lines = ops_of(path), python_lines(path)
        if not ops:
            outside.append(f"| `{path.name}` | {lines} |")
            rest += lines
            continue
        c = sum(kernel_lines(KERNELS / f"{name}.cl") for name in HELPERS.get(path.stem, (path.stem,)))
        rows.append(f"| {', '.join(ops)} | {lines} | {c} | {round((lines + c) / len(ops))} |")
        totals, count = [totals[0] + lines, totals[1] + c], count + len(ops)
    for name in ("common.h", *(f"{shared}.cl" for shared in SHARED)):
        outside.append(f"| `kernels/{name}` | {kernel_lines(KERNELS / name)} |")
        rest += kernel_lines(KERNELS / name)
    rows.append(f"| **all {count}** | **{totals[0]}** | **{totals[1]}** | **{round(sum(totals) / count)}** |")
    outside.append(f"| **all** | **{rest}** |")
    return "\n".join(rows) + "\n\n" + "\n".join(outside)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        readme = HERE / "README.md"
        between = re.compile(r"(?<=<!-- cost -->\n).*(?=\n<!-- /cost -->)", re.DOTALL)
        text, replacements = between.subn(lambda _: table(), readme.read_text())
        if not replacements:
            raise SystemExit("README.md has no place between <!-- cost --> and <!-- /cost -->")
        readme.write_text(text)
    else:
        print(table())
