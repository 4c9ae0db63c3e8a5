"""Runs the real launch scripts and configurations of other trainers through HAL's options and prints a table.

    python tests/as_written.py SOURCES

SOURCES holds checkouts of Megatron-LM, MindSpeed-LLM, MindSpeed-Core-MS, MindFormers or DeepSpeed's examples, one per
folder. Shell scripts are executed with bash in an empty folder, where torchrun, python, deepspeed, msrun, sbatch and
srun are replaced by recorders of their arguments and nothing but a few text utilities is in PATH; placeholders such as
<path> and "your path" are filled in. Of each recorded command, YAML file or JSON file, the options are resolved as by
`hal config show`. Files that name no data, vocabulary or length get none: missing ones are no problem here.
"""

from __future__ import annotations

import itertools
import json
import os
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

from hal.model.config.command_line import build, read
from hal.model.config.schema import ConfigError
from hal.model.config.validation import check_given

LAUNCHERS = ("torchrun", "python", "python3", "deepspeed", "msrun", "accelerate", "mpirun", "sbatch", "srun")
UTILITIES = "dirname realpath basename mkdir cat tee date hostname seq sed awk grep echo pwd wc env true ls head cut tr"
RECORDER = """#!{python}
import json, os, subprocess, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
scripts = [w for w in words if w.endswith(".sh")]
if name == "sbatch" and scripts:  # the script of a job
    sys.exit(subprocess.call(["/bin/bash", *words[words.index(scripts[0]):]]))
if name == "srun" and "-c" in words:  # a command of a job
    sys.exit(subprocess.call(["/bin/bash", "-c", words[-1]]))
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([name, *words]) + "\\n")
"""


def recorded(script: Path) -> list[list[str]]:
    """The commands that a launch script would start. Raises subprocess.TimeoutExpired after 30 seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools, work, record = folder / "tools", folder / "work", folder / "record"
        tools.mkdir(), work.mkdir(), record.touch()
        for launcher in LAUNCHERS:
            (tools / launcher).write_text(RECORDER.format(python=sys.executable))
            (tools / launcher).chmod(0o755)
        for utility in UTILITIES.split():
            found = shutil.which(utility)
            if found:
                (tools / utility).symlink_to(found)
        for file in script.parent.iterdir():
            if file.is_file() and file.suffix in (".sh", ".json"):
                (work / file.name).write_text(_filled(file.read_text(errors="replace")))
        (work / "pretrain_gpt.py").touch()
        environment = {"PATH": str(tools), "RECORD": str(record), "HOME": str(folder), "PWD": str(work)}
        arguments = [f"/path/{n}" for n in range(6)]
        command = ["/bin/bash", script.name, *arguments]
        subprocess.run(command, cwd=work, env=environment, capture_output=True, timeout=30, check=False)
        commands = [json.loads(line) for line in record.read_text().splitlines()]
        for words in commands:  # files that lie beside the script
            words[:] = [word.replace(str(work), str(script.parent)) for word in words]
        return commands


def _filled(text: str) -> str:
    text = re.sub(r"""=(["'])your [^"']*\1""", r"=\1/path\1", text)
    return re.sub(r'<[^<>\n]*>[^\s"]*', "/path", text)


def command_lines(sources: Path) -> Iterator[tuple[Path, list[str], int | None]]:
    """(file, options, processes if known) of all commands and configurations below a folder."""
    for script in sorted(sources.rglob("*.sh")):
        text = script.read_text(errors="replace")
        if "pretrain_gpt" not in text and "sc21" not in str(script):
            continue
        try:
            commands = recorded(script)
        except subprocess.TimeoutExpired:
            continue
        for words in commands:
            at = next((i for i, word in enumerate(words) if re.search(r"pretrain_gpt\w*\.py$", word)), None)
            if at is not None:
                yield script, words[at + 1 :], _processes(words[:at])
    for file in sorted(sources.rglob("*.yaml")):
        yield from _yaml(file)
    for file in sorted(sources.rglob("*.json")):
        keys = {"train_batch_size", "zero_optimization", "train_micro_batch_size_per_gpu"}
        try:
            content = json.loads(file.read_text())
        except ValueError:
            continue
        if isinstance(content, dict) and keys & set(content):
            yield file, ["--deepspeed-config", str(file)], None


def _yaml(file: Path) -> Iterator[tuple[Path, list[str], int | None]]:
    text = file.read_text(errors="replace")
    if re.search("^MODEL_ARGS:", text, re.MULTILINE) and "/gpt/" in str(file):
        given = (yaml.safe_load(text) or {}).get("MODEL_ARGS")
        if given:
            yield file, _model_args(given), 8
    elif re.search("^(training_config|parallel_config|runner_config):", text, re.MULTILINE):
        yield file, ["--config", str(file), "--train-iters", "10"], None


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


def _processes(launcher: list[str]) -> int | None:
    words = " ".join(launcher).replace("=", " ").replace("_", "-").split()
    numbers = {name: int(value) for name, value in itertools.pairwise(words) if value.isdecimal()}
    local = next((numbers[n] for n in ("--nproc-per-node", "--num-gpus") if n in numbers), None)
    nodes = numbers.get("--nnodes", numbers.get("--num-nodes", 1))
    return numbers.get("--worker-num", None if local is None else local * nodes)


def resolve(words: list[str], processes: int | None) -> tuple[str, str]:
    """("resolved", number of noted options), ("explained", the problems), or ("wrong", an error of another kind)."""
    os.environ.pop("WORLD_SIZE", None)
    if processes:
        os.environ["WORLD_SIZE"] = str(processes)
    try:
        config = build(read(words, {}, showing=True), check_given)
        return "resolved", f"{len(config.noted) + len(config.notes)} noted"
    except ConfigError as error:
        if processes and "is not divisible by tp" in str(error):  # the number of processes is not the file's
            return resolve(words, None)
        return "explained", "; ".join(problem.text for problem in error.problems)
    except Exception as error:
        return "wrong", repr(error)
    finally:
        os.environ.pop("WORLD_SIZE", None)


def main(sources: Path) -> int:
    """Prints the table and the counts; 1 if an error is not an explanation."""
    counts: dict[str, Counter[str]] = {}
    print("| checkout | commit | file | result | |\n|---|---|---|---|---|")
    for checkout in sorted(path for path in sources.iterdir() if path.is_dir()):
        head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
        commit = head.stdout[:9] if head.returncode == 0 else ""
        counts[checkout.name] = Counter()
        for file, words, processes in command_lines(checkout):
            result, detail = resolve(words, processes)
            counts[checkout.name][result] += 1
            shown = detail.replace("|", "\\|").replace("\n", " ")[:300]
            print(f"| {checkout.name} | {commit} | {file.relative_to(checkout)} | {result} | {shown} |")
    print()
    for name, count in counts.items():
        print(f"{name}: " + ", ".join(f"{n} {result}" for result, n in sorted(count.items())))
    return int(any(count["wrong"] for count in counts.values()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
