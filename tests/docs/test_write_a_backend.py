"""docs/write-a-backend.md, executed literally in a fresh environment: every file written, every command run.

A fence with a title is a file; "(append)" adds to it and "(edit)" replaces lines. In a console fence, "$" is a command
and what follows is its output, where "..." stands for anything: rest of a line, or any number of lines.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "write-a-backend.md"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    kind: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(kind, title, text) for kind, title, text in FENCE.findall(page)]


def commands(text: str) -> list[tuple[str, str]]:
    """(command, expected output) in order."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
    assert parts[0] == "", "output before the first command"
    return list(zip(parts[1::2], parts[2::2]))


def pattern(expected: str) -> re.Pattern[str]:
    """The expected output as a pattern; a line that is "..." is any number of lines."""
    lines = []
    for line in expected.splitlines():
        if line == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            lines.append(r".*".join(map(re.escape, line.split("..."))) + r"\n")
    return re.compile("".join(lines))


def edited(source: str, edits: str) -> str:
    """`source` with the line after each <<< replaced by the lines after >>>."""
    changes = []
    for line in edits.splitlines():
        mark, _, text = line.partition(" ") if " " in line else (line, "", "")
        if mark == "<<<":
            changes.append((text, []))
        else:
            assert mark == ">>>", line
            changes[-1][1].append(text)
    for old, new in changes:
        assert source.splitlines().count(old) == 1, f"not there exactly once: {old}"
        source = "\n".join(["\n".join(new) if line == old else line for line in source.splitlines()]) + "\n"
    return source


def write(folder: Path, block: Block) -> None:
    name, _, how = block.title.partition(" ")
    path = folder / name
    if how == "(append)":
        path.write_text(path.read_text() + block.text)
    elif how == "(edit)":
        path.write_text(edited(path.read_text(), block.text))
    else:
        assert not how, block.title
        path.write_text(block.text)


@pytest.mark.nightly
def test_the_page_does_what_it_says(fresh):
    for block in blocks(PAGE.read_text()):
        if block.title:
            write(fresh.folder, block)
        elif block.kind == "console":
            for command, expected in commands(block.text):
                if command.startswith("cd "):
                    fresh.folder = fresh.folder / command.removeprefix("cd ")
                    continue
                result = fresh.run(command, timeout=280)
                assert result.returncode == 0, f"$ {command}\n{result.stdout}"
                # On a terminal, for which the page is written, a line of progress stands in place of these.
                shown = "".join(x for x in result.stdout.splitlines(True) if not x.startswith("running "))
                assert pattern(expected).fullmatch(shown), f"$ {command}\n{shown}\nexpected:\n{expected}"


def test_the_page_names_every_step_that_is_tested():
    fences = blocks(PAGE.read_text())
    assert [b.title for b in fences if b.title.endswith(".py")] == [
        "hal_acme/driver.py",
        "hal_acme/norm.py",
        "hal_acme/activation.py",
        "hal_acme/rest.py",
    ]
    documented = [c for b in fences if b.kind == "console" for c, _ in commands(b.text)]
    for needed in (
        "hal new-backend",
        "hal info",
        "hal parity",
        "hal train",
        "hal why",
        "python -m pytest",
        "hal launch",
    ):
        assert any(c.startswith(needed) for c in documented), needed
    assert {b.kind for b in fences} == {"sh", "console", "python", "yaml"}


@pytest.mark.parametrize(
    "expected, output, right",
    [
        ("a\n", "a\n", True),
        ("a\n", "b\n", False),
        ("a ... c\n", "a bb c\n", True),
        ("a ... c\n", "a b\nc\n", False),
        ("...\nc\n", "a\nb\nc\n", True),
        ("...\nc\n", "a\nb\nd\n", False),
        ("a\n...\n", "a\n", True),
        ("", "", True),
        ("", "unexpected\n", False),
    ],
)
def test_expected_output_is_a_pattern(expected, output, right):
    assert bool(pattern(expected).fullmatch(output)) is right


def test_an_edit_replaces_a_line_that_is_there_once():
    assert edited("a\nb\n", "<<< a\n>>> c\n>>>\n>>>   d\n") == "c\n\n  d\nb\n"
    with pytest.raises(AssertionError, match="not there exactly once"):
        edited("a\na\n", "<<< a\n>>> b\n")
