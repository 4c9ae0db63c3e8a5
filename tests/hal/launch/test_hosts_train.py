"""Two hosts train one model, started by `hal launch` with a hostfile or by torchrun, and match one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
TRAIN = f"{SHAPE} --global-batch-size 4 --train-iters 4 --sample-tokens 0 --text-file text.txt --run-dir run".split()
ACROSS = ["--pipeline-model-parallel-size", "2"]


def by_hal(number: int) -> list[str]:
    """One process per host, selected from the hostfile by a filter; every host finds its own entry."""
    hosts = ["--hostfile", "hosts", "--include", "10.77.0.1:0@10.77.0.2:1", "--master-port", "29445"]
    return ["-m", "hal", "launch", "--backend", "cpu_ref", *hosts, "--log-dir", "logs", "train", *TRAIN, *ACROSS]


def by_torchrun(number: int) -> list[str]:
    where = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "10.77.0.1", "--master-port", "29446"]
    command = ["-m", "hal", "train", "--backend", "cpu_ref", *TRAIN, *ACROSS]
    return ["-m", "torch.distributed.run", *where, "--nproc-per-node", "1", *command]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [by_hal, pytest.param(by_torchrun, marks=pytest.mark.nightly)])
def test_two_hosts_train_as_one_process(two_hosts: tuple[str, str], launcher, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", *two_hosts)]
    for folder in folders:
        folder.mkdir()
        (folder / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(2000)))
        (folder / "hosts").write_text("10.77.0.1 slots=2\n10.77.0.2 slots=2\n")
    one = [sys.executable, "-m", "hal", "train", "--backend", "cpu_ref", *TRAIN]
    subprocess.run(one, cwd=folders[0], check=True, capture_output=True, timeout=180)
    nodes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *launcher(number)],
            cwd=tmp_path / name,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, name in enumerate(two_hosts)
    ]
    outputs = [node.communicate(timeout=180) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert _losses(folders[1]) == pytest.approx(_losses(folders[0]), rel=1e-5)
    assert not (folders[2] / "run" / "run.json").exists(), "only rank 0 reports the run"
    for name in two_hosts:
        result = subprocess.run(
            ["ip", "netns", "exec", name, "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True
        )
        sockets = [line.split() for line in result.stdout.decode().splitlines()]
        assert not [s for s in sockets if s[3:4] == ["0A"]], "a process still listens on the port"


def _losses(folder: Path) -> list[float]:
    return [loss for _, loss in json.loads((folder / "run" / "run.json").read_text())["losses"]]
