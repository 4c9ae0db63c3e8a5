"""A rank that stops responding is named, in any layout; a killed run resumes bit-identically."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from absence import noticed, stay_away
from parallel_runs import GPT2, trainer

import hal
from hal.testing.processes import run_processes


def _stops(options: dict[str, Any], folder: str) -> Any:
    run = trainer({**options, "distributed_timeout_minutes": 0.1})
    run.step()
    if run.mesh.rank == 1:
        Path(folder, "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        run.step()
        return "the step ended"
    except hal.CollectiveTimeout as error:
        if run.mesh.rank == 0:
            stay_away(folder, run.mesh.layout.world - 2)  # until the other ranks have detected the failure
            os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)
        else:
            noticed(folder, run.mesh.rank)
        return error.absent, "1" in str(error), error.seq > 0


@pytest.mark.parametrize(
    "world, layout",
    [
        pytest.param(2, {"tensor_model_parallel_size": 2}, id="tp2", marks=pytest.mark.slow),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="pp2", marks=pytest.mark.nightly),
        pytest.param(3, {"zero_stage": 3, "global_batch_size": 9}, id="zero3", marks=pytest.mark.slow),
        pytest.param(3, {"global_batch_size": 9}, id="dp3", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_stops_answering_is_named(world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    options = {**GPT2, **layout}
    results = run_processes(world, _stops, options, str(tmp_path), expect_exit=[1], timeout=180.0)
    assert [r for i, r in enumerate(results) if i != 1] == [((1,), True, True)] * (world - 1)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(2000)))
    return str(path)


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Starts a job that ends with the test: workers end with their launcher."""
    jobs: list[subprocess.Popen[str]] = []

    def start(command: list[str]) -> subprocess.Popen[str]:
        jobs.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        job.wait()


def _train(text: str, folder: Path, *more: str) -> list[str]:
    options = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    options += " --global-batch-size 4 --train-iters 40 --sample-tokens 0 --save-interval 2 --backend cpu_ref"
    return [sys.executable, "-m", "hal", "train", *options.split(), "--text-file", text, *more]


def _losses(folder: Path) -> dict[int, float]:
    return dict(json.loads((folder / "run.json").read_text())["losses"])


@pytest.mark.nightly
@pytest.mark.parametrize("saving", [[], ["--async-save"]], ids=["", "async"])
def test_a_killed_rank_ends_the_job_and_the_run_resumes_bit_for_bit(
    text: str, tmp_path: Path, saving: list[str], start: Callable[..., Any]
) -> None:
    layout = ["--nproc-per-node", "2", "--pipeline-model-parallel-size", "2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run([*_train(text, whole, *layout), "--run-dir", str(whole)], check=True, capture_output=True)
    save = ["--save", str(cut / "save"), "--run-dir", str(cut), *saving]
    job = start([*_train(text, cut, *layout), *save])
    tracker = _first_checkpoint(job, cut / "save")
    os.kill(_worker(1, cut), signal.SIGKILL)
    _, stderr = job.communicate(timeout=120)  # the collective itself would time out after ten minutes
    assert job.returncode == 1
    assert stderr.startswith("hal launch: rank 1 failed first (killed by SIGKILL)")
    at = int(tracker.read_text())
    assert 2 <= at < 40, "killed in the middle"
    subprocess.run([*_train(text, cut, *layout), *save, "--load", str(cut / "save")], check=True, capture_output=True)
    resumed, straight = _losses(cut), _losses(whole)
    assert {n: v for n, v in resumed.items() if n > at} == {n: v for n, v in straight.items() if n > at}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"])
def test_a_launched_job_ends_and_names_the_rank_that_stopped_answering(
    text: str, tmp_path: Path, layout: str, start: Callable[..., Any]
) -> None:
    train = _train(text, tmp_path, layout, "2", "--save", str(tmp_path / "save"), "--run-dir", str(tmp_path))
    train += ["--train-iters", "100000", "--save-interval", "50", "--distributed-timeout-minutes", "0.1"]
    launch = [*train[:3], "launch", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs")]
    job = start([*launch, *train[3:]])
    _first_checkpoint(job, tmp_path / "save")
    os.kill(_worker(1, tmp_path), signal.SIGSTOP)
    _, stderr = job.communicate(timeout=120)  # 6 s timeout, at most 7 s to detect it, and shutdown
    assert job.returncode == 1
    assert stderr.startswith("hal launch: rank 0 failed first (exit code 1)"), stderr
    match = re.search(r"hal train: (.+?) #(\d+) on group '(.+?)' timed out after 6 s on rank 0; (.*?)\.", stderr)
    assert match is not None, stderr
    op, seq, group, absent = match.groups()
    assert re.fullmatch(r"all_reduce|broadcast|step|save of iter_\d+", op) and (int(seq) > 0 or "save" in op)
    assert group in ("world", "tp", "pp") and absent == "ranks that did not arrive: 1"
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout


@pytest.mark.nightly
@pytest.mark.parametrize("recipient", ["launcher", "rank 1"])
def test_a_job_that_is_asked_to_stop_saves_and_ends_well(
    text: str, tmp_path: Path, start: Callable[..., Any], recipient: str
) -> None:
    more = ["--nproc-per-node", "2", "--run-dir", str(tmp_path), "--save", str(tmp_path / "save")]
    command = [*_train(text, tmp_path, *more), "--train-iters", "100000"]
    job = start(command)
    tracker = _first_checkpoint(job, tmp_path / "save")
    os.kill(job.pid if recipient == "launcher" else _worker(1, tmp_path), signal.SIGTERM)
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 0, stderr
    stopped_at = _losses(tmp_path).keys()
    assert int(tracker.read_text()) == max(stopped_at)


def _first_checkpoint(job: subprocess.Popen[str], save: Path) -> Path:
    """Waits until the tracker file exists and returns it."""
    tracker = save / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 120
    while not tracker.exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return tracker


def _worker(rank: int, folder: Path) -> int:
    """The process of a rank of the job whose command line contains `folder`."""
    pids = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout.split()
    return next(int(p) for p in pids if _environment(int(p)).get("RANK") == str(rank))


def _environment(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(e.decode(errors="replace").split("=", 1) for e in entries if b"=" in e)
