"""The options of a recorded launch script as HAL's YAML, with a comment for every option of the script."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from .command_line import GROUPS, build, read
from .launch_script import Command, recorded
from .schema import Config, ConfigError, report
from .show import describe
from .validation import check_given


def imported(script: Path, arguments: Sequence[str], number: int | None = None) -> tuple[str, int]:
    """Executes a launch script (`recorded`) and returns the YAML of the training that it would start, and the number of
    refused options, which the YAML lists as comments. number: which of several trainings, from 1.

    Raises ConfigError if the script starts no training of a GPT, starts several and no number is given, or has options
    whose values are wrong or unknown.
    """
    with recorded(script, arguments) as commands:
        trainings = [command for command in commands if command.trains_gpt]
        if not trainings:
            others = "".join(f"\n  {command}" for command in commands) or " nothing"
            raise ConfigError(
                f"{script} starts no training of a GPT (pretrain_gpt.py and the like). It started:{others}"
            )
        if number is None and len({command.options for command in trainings}) > 1:
            listed = "".join(f"\n  {n}: {command}" for n, command in enumerate(trainings, 1))
            raise ConfigError(f"{script} starts several trainings; choose one by --number:{listed}")
        if number is not None and not 1 <= number <= len(trainings):
            raise ConfigError(f"--number {number}: {script} starts {len(trainings)} trainings")
        command = trainings[(number or 1) - 1]
        config, refused = resolved(command)
    return "\n".join([*_heading(script, arguments, command), *describe(config, GROUPS, defaults=False), *refused]), len(
        refused
    )


def resolved(command: Command) -> tuple[Config, list[str]]:
    """The configuration of a recorded command, and its refused options as comments.

    Raises ConfigError for other problems, all in one report.
    """
    try:
        return _resolved(command.options, command.processes, command.nodes)
    except ConfigError as error:
        # Scripts are kept with a number of nodes that the user has to change. Their layout then says how many.
        if command.processes and all("is not divisible by" in problem.text for problem in error.problems):
            return _resolved(command.options, None, 1)
        raise


def _resolved(options: Sequence[str], processes: int | None, nodes: int) -> tuple[Config, list[str]]:
    words = list(options)
    if processes and processes > 1 and nodes == 1:
        words += ["--nproc-per-node", str(processes)]
    with _world(processes if nodes > 1 else None):
        values = read(words, {}, showing=True)
        refused = [problem for problem in values.problems if problem.kind == "refused"]
        others = [problem for problem in values.problems if problem.kind != "refused"]
        if others:
            raise report(values.problems)
        values.problems = []
        values.origins = {name: _origin(name, origin, options) for name, origin in values.origins.items()}
        try:
            config = build(values, check_given)
        except ConfigError as error:
            raise report([*refused, *error.problems]) from None
    lines = [f"# {problem.text}" for problem in refused]
    return config, ["\n# refused, and not in this file: `hal train` would otherwise train something else", *lines] if (
        lines
    ) else []


def _origin(name: str, origin: str, options: Sequence[str]) -> str:
    """Says of an option that it has its own name in the script, or which options or files it was translated from."""
    if origin != "command line":
        return "translated from " + origin.removeprefix("command line: ")
    spellings = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in options if word.startswith("--")}
    return "as in the script" if name in spellings else "translated: another name of it is in the script"


@contextlib.contextmanager
def _world(processes: int | None) -> Iterator[None]:
    """The number of processes, as a launcher tells it."""
    before = os.environ.pop("WORLD_SIZE", None)
    if processes:
        os.environ["WORLD_SIZE"] = str(processes)
    try:
        yield
    finally:
        os.environ.pop("WORLD_SIZE", None)
        if before is not None:
            os.environ["WORLD_SIZE"] = before


def _heading(script: Path, arguments: Sequence[str], command: Command) -> Iterator[str]:
    yield f"# from {shlex.join([str(script), *arguments])}, which runs {command.script} by {command.launcher}"
    yield "# start with: hal train --backend B --config THIS_FILE"
    if command.nodes > 1 and command.processes:
        local = command.processes // command.nodes
        yield f"# on {command.nodes} machines: hal launch --nnodes {command.nodes} --nproc-per-node {local} train ..."
    yield ""
