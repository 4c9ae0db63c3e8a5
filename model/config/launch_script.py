"""Records the commands that a launch script of another trainer would start, by executing it with recorders on PATH.

The script runs with bash in a temporary folder that holds copies of the small text files beside it and in the current
folder, so that what it writes there changes nothing. Placeholders for paths become names in the copies, because bash
would read them as redirections or as several words. Launchers (`LAUNCHERS`) and programs with effects elsewhere
(`STOPPED`) are replaced by recorders of their arguments; every other program that the script calls runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .schema import ConfigError

LAUNCHERS = ("torchrun", "python", "python3", "deepspeed", "msrun", "accelerate", "mpirun", "mpiexec", "sbatch", "srun")
"""Programs whose commands are recorded. sbatch and srun run the script or the command line that they are given."""

STOPPED = (
    *("ssh", "scp", "rsync", "pdsh", "docker", "nvidia-docker", "sudo", "kill", "pkill", "killall", "rm", "reboot"),
    *("pip", "pip3", "conda", "git", "wget", "curl"),
)
"""Programs that do nothing while a script is recorded: they would act on other processes, machines or files."""

_COPIED = (".sh", ".py", ".json", ".yaml", ".yml", ".txt", ".env", ".cfg", ".conf", ".template")
_SIZE = 1 << 20
_PLACEHOLDER = re.compile(
    r"""(?m)^(\s*(?:export\s+)?\w+=)(["']?)(<[^<>\n]+>[^\s"'#]*|your [^"'#\n]+?)\2(?=\s*(?:#.*)?$)"""
)
"""A shell variable whose value its user has to fill in: NAME=<a path>/vocab.json, NAME="your tokenizer path"."""

_MODULES = ("torch.distributed.launch", "torch.distributed.run", "deepspeed", "deepspeed.launcher.runner")

_NODES = ("--nnodes", "--num-nodes", "--num-machines", "--nodes", "-N")
_LOCAL = ("--nproc-per-node", "--num-gpus")
_TOTAL = ("--worker-num", "--num-processes", "--ntasks", "-n", "-np", "--np")
_TASKS_OF_NODE = "--ntasks-per-node"
"""Options of launchers: the number of machines, of processes on each, and of all processes."""

_RECORDER = """
import json, os, subprocess, sys
name, words = sys.argv[1], sys.argv[2:]
job = json.loads(os.environ.get("HAL_RECORD_JOB", "[]"))  # the launchers and the job around this command
scripts = [i for i, word in enumerate(words) if word.endswith((".sh", ".sbatch", ".slurm"))]
if name == "job" or (name == "sbatch" and scripts):  # the given script, or one that it submits
    at = scripts[0] if name == "sbatch" else 0
    with open(words[at], encoding="utf-8", errors="replace") as file:
        header = [word for line in file if line.startswith("#SBATCH") for word in line.split()[1:]]
    os.environ["HAL_RECORD_JOB"] = json.dumps([*header, *words[:at]])
    sys.exit(subprocess.call(["bash", *words[at:]]))
if name in ("srun", "mpirun", "mpiexec") and "-c" in words[:-1]:  # a command line of a job
    at = words.index("-c")
    os.environ["HAL_RECORD_JOB"] = json.dumps([*job, name, *words[:at]])
    sys.exit(subprocess.call(["bash", "-c", words[at + 1]]))
if name.startswith("python") and not {"srun", "mpirun", "mpiexec"}.intersection(job):
    job = []  # one process, whatever the job has
with open(os.environ["HAL_RECORD"], "a", encoding="utf-8") as file:
    file.write(json.dumps([name, *job, *words]) + "\\n")
"""


@dataclass(frozen=True)
class Command:
    """A recorded command. script: its Python file or module; options: what follows it; processes and nodes: as given
    to the launcher, None if the launcher was not told."""

    launcher: str
    script: str
    options: tuple[str, ...]
    processes: int | None
    nodes: int

    @property
    def trains_gpt(self) -> bool:
        """Whether the script is one of a GPT's training, by the names that these trainers use."""
        return re.search(r"(pretrain|train|posttrain|finetune)_?gpt\w*(\.py)?$", self.script) is not None

    def __str__(self) -> str:
        return shlex.join([self.launcher, "...", self.script, *self.options])


@contextlib.contextmanager
def recorded(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> Iterator[list[Command]]:
    """Executes `script` with bash and yields the commands of Python programs that it would have started, in order.

    Files that the script wrote (a DeepSpeed configuration) exist until the context ends; options that name one are
    absolute. environment: of the script, by default that of this process; its PATH follows the recorders.

    Raises ConfigError if there is no such script, if it does not end within `timeout` seconds, or if it fails before it
    starts a Python program.
    """
    if not script.is_file():
        raise ConfigError(f"there is no launch script {script}")
    environment = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory(prefix="hal-import-") as name:
        folder = Path(name).resolve()
        tools, record = folder / "tools", folder / "record"
        work, relative = _copied(script.absolute(), folder)
        tools.mkdir()
        record.touch()
        recorder = folder / "recorder.py"
        recorder.write_text(_RECORDER)
        for tool in (*LAUNCHERS, *STOPPED):
            command = shlex.join([sys.executable, "-I", str(recorder), tool])
            (tools / tool).write_text(f'#!/bin/sh\nexec {command} "$@"\n' if tool in LAUNCHERS else "#!/bin/sh\n")
            (tools / tool).chmod(0o755)
        environment |= {
            "PATH": f"{tools}:{environment.get('PATH', os.defpath)}",
            "HAL_RECORD": str(record),
            "PWD": str(work),
        }
        code = _run(recorder, [str(relative), *arguments], work, environment, timeout, folder / "output")
        commands = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        if code and not commands:
            last = (folder / "output").read_text(errors="replace").splitlines()[-3:] or ["nothing"]
            said = "".join(f"\n  {line}" for line in last)
            raise ConfigError(f"{script} ended with exit code {code} and started nothing. It printed:{said}")
        yield [_command(_where_it_was(words, work)) for words in commands if _program(words) is not None]


def _copied(script: Path, folder: Path) -> tuple[Path, Path]:
    """Copies the script, and the small text files beside it and in the current folder. Returns the working folder and
    the script's path relative to it."""
    here = Path.cwd()
    inside = script.is_relative_to(here)
    work = folder / "work"
    relative = script.relative_to(here) if inside else Path(script.name)
    for source, target in {here: work, script.parent: (work / relative).parent}.items():
        target.mkdir(parents=True, exist_ok=True)
        if source == here and not inside:
            continue
        for file in source.iterdir():
            if file == script or (file.suffix in _COPIED and file.is_file() and file.stat().st_size <= _SIZE):
                shutil.copyfile(file, target / file.name)
                if file.suffix == ".sh":
                    _name_placeholders(target / file.name)
    return work, relative


def _name_placeholders(script: Path) -> None:
    """Makes placeholders words of letters: <Specify path>/vocab.json becomes Specify_path_/vocab.json."""
    text = script.read_text(encoding="utf-8", errors="surrogateescape")
    named = _PLACEHOLDER.sub(lambda found: found[1] + re.sub(r"[^\w./]+", "_", found[3]).strip("_"), text)
    script.write_text(named, encoding="utf-8", errors="surrogateescape")


def _run(
    recorder: Path, words: Sequence[str], work: Path, environment: Mapping[str, str], timeout: float, output: Path
) -> int:
    """Runs the script and its arguments in a separate process group, so that all its children end with it. Returns its
    exit code; what it prints is in `output`."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-I", str(recorder), "job", *words],
            cwd=work,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{words[0]} did not end within {timeout:g} seconds; it waits for something") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _where_it_was(words: Sequence[str], work: Path) -> list[str]:
    """The words with paths of the temporary folder replaced by the original ones, except of files that were written."""

    def original(word: str) -> str:
        if str(work) not in word and not word.endswith(".json"):
            return word
        here, there = work / word, Path(word.replace(str(work), str(Path.cwd())))
        written = here.is_file() and not (there.is_file() and there.read_bytes() == here.read_bytes())
        return str(here if written else there)

    return [original(word) for word in words]


def _program(words: Sequence[str]) -> int | None:
    """The index of the Python program that a recorded command runs: a file, or the word after -m."""
    for at, word in enumerate(words):
        if at and words[at - 1] == "-m" and word not in _MODULES and not word.isdecimal():
            return at
        if word.endswith(".py"):
            return at
    return None


def _command(words: Sequence[str]) -> Command:
    at = _program(words)
    assert at is not None
    given = re.sub(r" -([nN])(\d+)", r" -\1 \2", " ".join(words[:at]).replace("=", " ").replace("_", "-")).split()
    numbers = {name: int(value) for name, value in itertools.pairwise(given) if value.isdecimal()}

    def number(names: Sequence[str]) -> int | None:
        return next((numbers[name] for name in names if name in numbers), None)

    nodes = number(_NODES) or 1
    local, processes = number(_LOCAL), number(_TOTAL)
    if local is None and processes is None:
        local = numbers.get(_TASKS_OF_NODE)  # of srun, which may start one launcher on every node
    processes = processes if local is None else local * nodes
    return Command(words[0], words[at], tuple(words[at + 1 :]), processes, nodes)
