"""hal launch: run a command as one job of several processes, on one or several machines.

`hal launch --backend B --nproc-per-node N train ...` starts N processes here; with --nnodes (or a hostfile) the same
command is started once on every machine. `hal train --nproc-per-node N` is the short form.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hal.errors import ContractError
from hal.launch.agent import Job, run, without_working_directory
from hal.launch.hosts import MAX_HOSTFILE_BYTES, Host, parse_hostfile, select, this_host
from hal.untrusted import read_text

from . import COMMANDS
from .arguments import Parser

_DEFAULT_PORT = 29500
DEVICES = "HAL_DEVICES"
"""Environment variable: comma-separated device indices of this node's processes, by local rank."""


def parser() -> argparse.ArgumentParser:
    """The options of `hal launch`."""
    command_parser = Parser("launch", description=__doc__)
    add = command_parser.add_argument
    add("--backend", help="backend of the processes (HAL_BACKEND, and --backend of a hal command)")
    add("--simulate", action="store_true", help="the backend's simulator instead of its device (HAL_SIMULATE)")
    # The other names are those of torchrun, deepspeed and msrun.
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        "--num_gpus",
        "--local_worker_num",
        type=int,
        help="processes on this machine (default 1, or the hostfile's slots)",
    )
    add("--nnodes", "--num_nodes", type=_nodes, help="machines, or MIN:MAX (default 1, or those of the hostfile)")
    add("--worker-num", "--worker_num", type=int, help="processes on all machines together")
    add(
        "--node-rank",
        "--node_rank",
        type=int,
        help="index of this machine (default 0, or its position in the hostfile)",
    )
    add("--master-addr", "--master_addr", help="address of machine 0 (default 127.0.0.1 on one machine)")
    add(
        "--master-port",
        "--master_port",
        type=int,
        help="port of machine 0 (default: any free one on one machine, else 29500)",
    )
    add("--hostfile", type=Path, help="machines, one 'name slots=COUNT' per line")
    add("-i", "--include", default="", help="machines and slots to use, e.g. a@b:0,2")
    add("-e", "--exclude", default="", help="machines and slots to leave out")
    add(
        "--log-dir",
        "--log_dir",
        type=Path,
        help="folder for worker_RANK.log (default: a temporary one, kept on failure)",
    )
    add(
        "--cluster-timeout",
        "--cluster_time_out",
        type=float,
        default=600.0,
        help="seconds to wait for the other machines",
    )
    add("--max-restarts", type=int, default=0, help="how often failed processes start again (default 0)")
    add(
        "--exit-signal-grace",
        type=float,
        help="seconds to save and end after SIGTERM (default: measured by `hal train`, at least 30)",
    )
    add(
        "--join",
        type=str.lower,
        choices=("true", "false"),
        default="true",
        help="false: return immediately; the job continues in the background",
    )
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, with its arguments")
    add("command", nargs=argparse.REMAINDER, help="a hal command or a script, with its arguments")
    return command_parser


def _nodes(text: str) -> tuple[int, int]:
    """(fewest, most) machines of N or MIN:MAX."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def _with_hosts(options: argparse.Namespace) -> Host | None:
    """This machine's entry in the hostfile, if there is one. Sets the options that follow from the hostfile."""
    if options.hostfile is None:
        if options.include or options.exclude:
            raise ContractError("--include and --exclude choose from a --hostfile, which was not given")
        return None
    try:
        text = read_text(options.hostfile, ContractError, MAX_HOSTFILE_BYTES)
    except (OSError, ContractError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ContractError(
            f"--hostfile {options.hostfile} cannot be read ({reason}); it must have one 'name slots=COUNT' per line"
        ) from None
    hosts = select(parse_hostfile(text), options.include, options.exclude)
    fewest, most = options.nnodes or (len(hosts), len(hosts))
    if most != len(hosts):
        raise ContractError(f"--nnodes {most} contradicts the hostfile, which leaves {len(hosts)} machines")
    options.nnodes = fewest, most
    if options.node_rank is None:
        options.node_rank = this_host(hosts) if len(hosts) > 1 else 0
    if not 0 <= options.node_rank < len(hosts):
        raise ContractError(f"--node-rank {options.node_rank}: the hostfile leaves {len(hosts)} machines, from 0 on")
    host: Host = hosts[options.node_rank]
    if options.nproc_per_node not in (None, len(host.slots)):
        raise ContractError(f"--nproc-per-node {options.nproc_per_node} contradicts {host.name}'s slots {host.slots}")
    options.nproc_per_node = len(host.slots)
    if options.master_addr is None and len(hosts) > 1:
        options.master_addr = hosts[0].name
    return host


def job_of(argv: Sequence[str]) -> tuple[Job, bool]:
    """The job of `hal launch ARGV` on this machine, and whether to wait for its end."""
    options = parser().parse_args(list(argv))
    host = _with_hosts(options)
    environment = {}
    if host is not None:
        environment[DEVICES] = ",".join(map(str, host.slots))
    command = [part for i, part in enumerate(options.command) if i or part != "--"]
    if options.module:
        command = ["-m", *options.module]
    if options.simulate:
        environment["HAL_SIMULATE"] = "1"
    if options.backend:
        environment["HAL_BACKEND"] = options.backend
        if command and command[0] != "-m" and not command[0].endswith(".py") and "--backend" not in command:
            command += ["--backend", options.backend]
    _share_workers(options)
    min_nodes, nnodes = options.nnodes or (1, 1)
    if nnodes > 1 and options.master_addr is None:
        raise ContractError(f"--nnodes {nnodes} needs --master-addr, the address of machine 0")
    if options.join == "false" and options.log_dir is None:
        raise ContractError("--join false needs --log-dir, because the output of the job is not shown otherwise")
    job = Job(
        command,
        nproc=1 if options.nproc_per_node is None else options.nproc_per_node,
        nnodes=nnodes,
        node_rank=options.node_rank or 0,
        master_addr=options.master_addr or "127.0.0.1",
        master_port=options.master_port if options.master_port is not None else (_DEFAULT_PORT if nnodes > 1 else 0),
        log_dir=options.log_dir,
        cluster_timeout=options.cluster_timeout,
        environment=environment,
        exit_signal_grace=options.exit_signal_grace,
        max_restarts=options.max_restarts,
        min_nodes=min_nodes,
    )
    return job, options.join == "true"


def _share_workers(options: argparse.Namespace) -> None:
    """Sets the machines, or the processes of each, that follow from --worker-num."""
    total = options.worker_num
    if total is None:
        return
    if options.nproc_per_node is None:
        options.nproc_per_node = total // (options.nnodes[1] if options.nnodes else 1)
    if options.nnodes is None:
        options.nnodes = (total // options.nproc_per_node if options.nproc_per_node > 0 else 0,) * 2
    if total < 1 or options.nproc_per_node * options.nnodes[1] != total:
        raise ContractError(
            f"--worker-num {total} is not --nnodes {options.nnodes[1]} times --nproc-per-node {options.nproc_per_node}"
        )


def _require_command(command: Sequence[str]) -> None:
    """Raises ContractError for a command that no worker could run, before any worker is started."""
    if not command or command[0] == "-m":
        return
    if command[0].endswith(".py"):
        if not Path(command[0]).is_file():
            raise ContractError(f"launch: there is no script {command[0]}")
    elif command[0] not in COMMANDS:
        raise ContractError(
            f"launch: '{command[0]}' is neither a script (.py) nor a hal command; commands: {', '.join(COMMANDS)}"
        )


def main(argv: Sequence[str]) -> int:
    """Runs the job; the exit code is that of the worker that failed first."""
    job, join = job_of(argv)
    _require_command(job.command)
    os.umask(os.umask(0o027) | 0o027)  # logs and files of the workers are not readable by everyone
    if join:
        return run(job)
    assert job.log_dir is not None
    job.log_dir.mkdir(parents=True, exist_ok=True)
    with (job.log_dir / "launch.log").open("w") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, *without_working_directory("hal.cli")),
                *("launch", "--join", "true", *argv_without_join(argv)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ),
        )
    print(f"hal launch: started as process {process.pid}; logs are in {job.log_dir}")
    return 0


def argv_without_join(argv: Sequence[str]) -> list[str]:
    """`argv` without the launcher's own --join."""
    words = list(argv)
    for i, word in enumerate(words):
        if word == "--join":
            return words[:i] + words[i + 2 :]
        if word.startswith("--join="):
            return words[:i] + words[i + 1 :]
    return words
