"""hal launch: one job, its logs, and how it ends. Each test starts real processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = """
import os, sys, time
import torch, hal
comm = hal.torch_comm(hal.GLOO, timeout=60)
# One write per line, because the output of workers that share a console would otherwise be interleaved.
os.write(1, f"rank {comm.rank} of {comm.size} sum {comm.all_reduce(torch.tensor(comm.rank)).item()}\\n".encode())
mode = sys.argv[1]
if mode == "listening":
    open_files = [f"/proc/self/fd/{f}" for f in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(f) for f in open_files if os.path.islink(f)}
    lines = [l.split() for p in ("tcp", "tcp6") for l in open(f"/proc/net/{p}").readlines()[1:]]
    mine = [l[1] for l in lines if l[3] == "0A" and f"socket:[{l[9]}]" in inodes]
    print("listening on", sorted({address.split(":")[0] for address in mine}))
if comm.rank == 1:
    if mode == "raise":
        raise ValueError("planted in rank 1")
    if mode == "kill":
        os.kill(os.getpid(), 9)
    if mode == "exit":
        sys.exit(7)
if mode in ("raise", "kill", "exit"):
    comm.all_reduce(torch.ones(1))
if mode == "sleep":
    time.sleep(float(sys.argv[2]))
    print("slept")
"""


@pytest.fixture
def worker(tmp_path: Path) -> str:
    (tmp_path / "worker.py").write_text(WORKER)
    return str(tmp_path / "worker.py")


def launch(
    *argv: str, prefix: tuple[str, ...] = (), program: tuple[str, ...] = ("-m", "hal"), timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, *program, "launch", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_the_console_does_not_repeat_an_earlier_jobs_log(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("import sys; print(' '.join(sys.argv[1:]))")
    console = [
        launch("--log-dir", str(tmp_path / "logs"), str(tmp_path / "say.py"), *words).stdout.split()
        for words in (["a", "long", "first", "line"], ["short"])
    ]
    assert console == [["a", "long", "first", "line"], ["short"]]


def test_a_job_of_two_writes_its_logs_and_leaves_nothing(worker: str, tmp_path: Path) -> None:
    done = launch("--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"), worker, "listening")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 sum 1" in done.stdout and "rank 1" not in done.stdout, "the console shows the first worker"
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["worker_0.log", "worker_1.log"]
    log = (tmp_path / "logs" / "worker_1.log").read_text()
    assert "rank 1 of 2 sum 1" in log
    if sys.platform == "linux":
        assert "listening on ['0100007F']" in log, "only on 127.0.0.1"
    assert worker not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "how, code, words",
    [
        ("raise", 1, ["rank 1 failed first (exit code 1)", "Traceback", "ValueError: planted in rank 1"]),
        pytest.param("kill", 1, ["rank 1 failed first (killed by SIGKILL)"], marks=pytest.mark.slow),
        pytest.param("exit", 7, ["rank 1 failed first (exit code 7)"], marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_failed_first_is_explained_first(worker: str, how: str, code: int, words: list[str]) -> None:
    done = launch("--nproc-per-node", "3", worker, how)
    assert done.returncode == code
    positions = [done.stderr.find(w) for w in words]
    assert -1 not in positions and positions == sorted(positions) and positions[0] == len("hal launch: "), done.stderr
    folder = Path(done.stderr.split("its log is ")[1].split("\n")[0]).parent
    assert (folder / "worker_2.log").exists(), "logs of a failed job are kept"
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_killed_launcher_takes_its_workers_with_it(worker: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hal", "launch", "--nproc-per-node", "2", "--log-dir", str(tmp_path), worker]
    launcher = subprocess.Popen([*command, "sleep", "600"], stdout=subprocess.DEVNULL)
    log = tmp_path / "worker_0.log"
    while not (log.exists() and "rank 0" in log.read_text()):
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 60
    while worker in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_join_false_returns_at_once_and_the_job_goes_on(
    worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "typing.py").write_text("raise ImportError('the wrong typing')\n")
    monkeypatch.chdir(tmp_path)
    # This process ignores the working directory; the launcher that it starts must do so on its own.
    safe = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; from hal.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    done = launch(
        "--nproc-per-node",
        "2",
        "--join",
        "false",
        "--log-dir",
        str(tmp_path / "logs"),
        worker,
        "sleep",
        "2",
        program=("-c", safe),
    )
    assert done.returncode == 0 and "started as process" in done.stdout
    log = tmp_path / "logs" / "worker_1.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "slept" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_node_whose_node_0_is_missing_says_so(worker: str) -> None:
    where = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "29411"]
    done = launch(*where, "--cluster-timeout", "2", worker, "")
    assert done.returncode == 2 and "did not answer within 2 s" in done.stderr and "127.0.0.1:29411" in done.stderr


THREADS_AT_EXIT = """
import atexit, os

@atexit.register  # runs after the handlers that the import of hal registers
def _print() -> None:
    threads = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    count = sum("gloo" in name for name in threads)
    os.write(1, f"gloo threads: {count}\\n".encode())  # in one piece, as both ranks write here

import torch, hal
comm = hal.torch_comm(hal.GLOO, timeout=60)
pair = hal.torch_comm(hal.GLOO, [0, 1], timeout=60)
assert pair.all_reduce(comm.all_reduce(torch.ones(1))).item() == 4
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads by /proc")
def test_no_thread_of_gloo_outlives_the_interpreter(tmp_path: Path) -> None:
    """Such a thread aborts the process if it then releases the last reference to a tensor."""
    (tmp_path / "worker.py").write_text(THREADS_AT_EXIT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(tmp_path / "worker.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("gloo threads: 0") == 2, done.stdout + done.stderr


@pytest.mark.slow
def test_torchrun_starts_the_same_workers(worker: str) -> None:
    # --standalone takes a free port: 29500 may be in use by another job of this machine.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", worker, ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "rank 1 of 2 sum 1" in done.stdout, done.stderr


@pytest.mark.slow
def test_two_hosts_run_one_job(two_hosts: tuple[str, str], worker: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("10.77.0.1 slots=2\n10.77.0.2 slots=1\n")
    command = [sys.executable, "-m", "hal", "launch", "--hostfile", str(hostfile), "--master-port", "29444"]
    nodes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command, "--log-dir", str(tmp_path / name), worker, ""],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in two_hosts
    ]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "rank 0 of 3 sum 3" in outputs[0][0] and "rank 2 of 3 sum 3" in outputs[1][0]
    assert (tmp_path / two_hosts[1] / "worker_2.log").exists()
