"""docs/features.md covers every planned feature once, and the tests, files, options and commands it names exist."""

import argparse
import ast
import functools
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

from hal.cli import COMMANDS
from hal.cli.launch import parser as launch_parser
from hal.model.config.command_line import parser as train_parser
from hal.model.config.formats.megatron_options import table

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "features.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line.startswith("| F")]
STATES = ("works", "partly", "planned", "not verifiable here", "out of scope")
IDS = [f"F{n:03d}" for n in range(1, 165)]


def named(cell: str) -> list[str]:
    """The targets of a row: everything in backticks."""
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def functions_in(path: Path) -> dict[str, str]:
    """Name -> source of each test function in a file; methods as Class::name."""
    source = path.read_text()
    functions = {}
    for node in ast.parse(source).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)) and member.name.startswith("test"):
                functions[prefix + member.name] = source
    return functions


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


ACCEPTED = {f"--{name}" for name, row in table().items() if row.kind in ("translated", "noted")}
FLAGS = {"train": flags_of(train_parser()) | ACCEPTED, "launch": flags_of(launch_parser())}


def problem(thing: str) -> str | None:
    """Why a target of a row does not exist; None if it does."""
    if thing.startswith("hal "):
        command, *words = thing.split()[1:]
        if command not in COMMANDS:
            return f"there is no command hal {command}"
        source = Path(importlib.import_module(f"hal.cli.{command}").__file__).read_text()
        shared = (ROOT / "hal" / "cli" / "arguments.py").read_text()
        for flag in (word for word in words if word.startswith("--")):
            there = flag in FLAGS[command] if command in FLAGS else f'"{flag}"' in source + shared
            if not there:
                return f"hal {command} has no option {flag}"
        return None
    if thing.startswith("--"):
        return None if thing in FLAGS["train"] else f"hal train has no option {thing}"
    if thing.startswith("hal."):
        return None if hasattr(importlib.import_module("hal"), thing.split(".")[1]) else f"hal has no {thing}"
    path, _, test = thing.partition("::")
    if not (ROOT / path).is_file():
        return f"{thing} is no file, test, command, option or name of HAL"
    name, _, case = test.partition("[")
    if name and name not in functions_in(ROOT / path):
        return f"{path} has no test {name}"
    if case and no_such_case(path, case.rstrip("]")):
        return f"{path}::{name} has no case {case.rstrip(']')}"
    return None


def no_such_case(path: str, case: str) -> bool:
    """Whether a layout's case is unknown: SHAPE-LAYOUT or SHAPE-LAYOUT-dropout, as in test_layouts.py."""
    shape, _, layout = case.removesuffix("-dropout").partition("-")
    tree = ast.parse((ROOT / path).read_text())
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    layouts = {key.value for d in dicts for key in d.keys if isinstance(key, ast.Constant)}
    return shape not in ("gpt2", "llama") or layout not in layouts


def test_every_feature_is_there_once_and_in_order() -> None:
    assert [row[0] for row in ROWS] == IDS
    assert all(len(row) == 4 and all(row) for row in ROWS)


def test_states_are_known_and_counted_at_the_top() -> None:
    counts = Counter(row[2] for row in ROWS)
    assert set(counts) <= set(STATES)
    for state in STATES:
        assert f"| {state} | {counts[state]} |" in TEXT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_row_names_exists(row: list[str]) -> None:
    _, _, state, cell = row
    assert [p for p in map(problem, named(cell)) if p] == []
    if state in ("works", "partly"):
        assert [x for x in named(cell) if x.startswith(("hal ", "--")) or "/" in x or (ROOT / x).is_file()]
    if state == "partly":
        assert "missing: " in cell, "the row does not say what is missing"
    if state == "not verifiable here":
        assert "needs: " in cell, "the row does not name the device, download or container"


@pytest.mark.parametrize(
    "thing",
    [
        "tests/test_features.py::test_that_nobody_wrote",
        "tests/absent.py::test_x",
        "tests/model/training/test_layouts.py::test_a_layout_trains_as_one_process[gpt2-dp7]",
        "hal fly",
        "hal train --no-such-option",
        "hal launch --no-such-option",
        "hal parity --no-such-option",
        "--no-such-option",
        "hal.nothing",
        "docs/absent.md",
        "word",
    ],
)
def test_what_does_not_exist_is_noticed(thing: str) -> None:
    assert problem(thing) is not None
