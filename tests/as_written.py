"""Runs the real launch scripts and configurations of other trainers through HAL's options and prints a table.

    python tests/as_written.py SOURCES >docs/verified/as-written.md

SOURCES holds checkouts of Megatron-LM, MindSpeed-LLM, MindSpeed-Core-MS, MindFormers or DeepSpeed's examples, one per
folder; a folder NAME@REVISION holds the files of that revision. Shell scripts are executed as by `hal config import`,
in an empty folder and with only a few text utilities in PATH; placeholders such as <path> and "your path" are filled
in. Of each recorded command, YAML file or JSON file, the options are resolved as by `hal config show`. Files that name
no data or vocabulary get none: missing ones are no problem here. YAML files that name no length get 100000 steps.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hal.model.config.imported import resolved
from hal.model.config.launch_script import Command, recorded
from hal.model.config.schema import ConfigError

UTILITIES = (
    "bash sh dirname realpath basename mkdir cat tee date hostname seq sed awk grep echo pwd wc env true ls head cut tr"
)

HEADING = """# As written

Launch scripts and configurations of other trainers, through HAL's options (`make as-written SOURCES=DIR`). "resolved":
`hal config show` gives a configuration (data files aside); "explained": one report of all problems; "wrong": an error
without an explanation. A script may start several trainings, and has a row for each."""


@contextlib.contextmanager
def commands_of(script: Path) -> Iterator[list[Command]]:
    """The commands that a launch script would start, with its placeholders filled in and an argument for each $1 to $9
    that it reads. Raises ConfigError if it does not end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        tools, work = folder / "tools", folder / "work"
        tools.mkdir(), work.mkdir()
        for utility in UTILITIES.split():
            found = shutil.which(utility)
            if found:
                (tools / utility).symlink_to(found)
        for file in script.parent.iterdir():
            if file.is_file() and file.suffix in (".sh", ".json"):
                (work / file.name).write_text(_filled(file.read_text(errors="replace")))
        arguments = [f"/path/{n}" for n in range(_arguments(script))]
        with (
            contextlib.chdir(work),
            recorded(
                Path(script.name), arguments, environment={"PATH": str(tools), "HOME": name}, timeout=30
            ) as commands,
        ):
            yield commands


def _arguments(script: Path) -> int:
    """How many arguments a script reads by position, outside of its functions' own."""
    text = script.read_text(errors="replace")
    return max((int(n) for n in re.findall(r"\$\{?([1-9])", text)), default=0)


def _filled(text: str) -> str:
    text = re.sub(r"""=(["'])your [^"'\n]*\1""", r"=\1/path\1", text)
    text = re.sub(r"(?m)^(\s*)(\w+)=your [^\n#]*$", r"\1\2=/path", text)
    return re.sub(r'<[^<>\n]*>[^\s"]*', "/path", text)


def results(sources: Path) -> Iterator[tuple[Path, str, str]]:
    """(file, result, detail) of all commands and configurations below a folder; `result` as `result_of` gives it."""
    for script in sorted(sources.rglob("*.sh")):
        text = script.read_text(errors="replace")
        if "pretrain_gpt" not in text and "sc21" not in str(script):
            continue
        with contextlib.suppress(ConfigError), commands_of(script) as commands:
            for command in commands:
                if command.trains_gpt:
                    yield script, *result_of(command)
    for file in sorted(sources.rglob("*.yaml")):
        options = _yaml(file)
        if options is not None:
            yield file, *result_of(options)
    for file in sorted(sources.rglob("*.json")):
        keys = {"train_batch_size", "zero_optimization", "train_micro_batch_size_per_gpu"}
        try:
            content = json.loads(file.read_text())
        except ValueError:
            continue
        if isinstance(content, dict) and keys & set(content):
            yield file, *result_of(Command("", "", ("--deepspeed-config", str(file)), None, 1))


def _yaml(file: Path) -> Command | None:
    """The command of a functional test of Megatron-LM, or of a configuration of MindFormers or MindSpeed-Core-MS."""
    text = file.read_text(errors="replace")
    if re.search("^MODEL_ARGS:", text, re.MULTILINE) and "/gpt/" in str(file):
        given = (yaml.safe_load(text) or {}).get("MODEL_ARGS")
        if given:
            return Command("", "", tuple(_model_args(given)), 8, 1)
    elif re.search("^(training_config|parallel_config|runner_config):", text, re.MULTILINE):
        return Command("", "", ("--config", str(file), "--train-iters", "100000"), None, 1)
    return None


def _model_args(given: dict[str, Any]) -> list[str]:
    """The command line of a functional test of Megatron-LM, as its runner builds it."""
    words: list[str] = []
    for flag, value in given.items():
        text = str(value).replace("${REPEAT}", "1").strip("[]'")
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, *(text.replace(",", " ").split() if isinstance(value, list) or " " in text else [text])]
    return words


def result_of(command: Command) -> tuple[str, str]:
    """("resolved", number of noted options), ("explained", the problems), or ("wrong", an error of another kind)."""
    try:
        config, refused = resolved(command)
    except ConfigError as error:
        return "explained", "; ".join(problem.text for problem in error.problems)
    except Exception as error:
        return "wrong", repr(error)
    if refused:
        return "explained", "; ".join(line.removeprefix("# ") for line in refused[1:])
    return "resolved", f"{len(config.noted) + len(config.notes)} noted"


def main(sources: Path) -> int:
    """Prints the counts and the table as Markdown; 1 if an error is not an explanation."""
    counts: dict[str, Counter[str]] = {}
    rows = []
    for checkout in sorted(path for path in sources.iterdir() if path.is_dir()):
        head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
        name = f"{checkout.name} {head.stdout[:9] if head.returncode == 0 else ''}".strip()
        counts[name] = Counter()
        for file, result, detail in results(checkout):
            counts[name][result] += 1
            shown = re.sub(r"\S*(hal-import-\w+|tmp\w+)/\w+/", "", detail.replace(f"{checkout}/", ""))
            shown = shown.replace("|", "\\|").replace("\n", " ")[:240]
            rows.append(f"| {name} | {file.relative_to(checkout)} | {result} | {shown} |")
    print(f"{HEADING}\n\n| checkout | resolved | explained | wrong |\n|---|---|---|---|")
    for name, count in counts.items():
        print(f"| {name} | {count['resolved']} | {count['explained']} | {count['wrong']} |")
    print("\n| checkout | file | result | |\n|---|---|---|---|", *rows, sep="\n")
    return int(any(count["wrong"] for count in counts.values()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
