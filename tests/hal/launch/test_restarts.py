"""Jobs that are killed, asked to stop, or run beside files of the same name as the standard library's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hal.launch import agent

TRAIN = ["train", "--backend", "cpu_ref", "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"]
TRAIN += ["--seq-length", "16", "--micro-batch-size", "2", "--tensor-model-parallel-size", "2", "--sample-tokens", "0"]
TRAIN += ["--train-iters", "12", "--save-interval", "3", "--log-interval", "1"]

KILL_ONCE = """
import os, signal, sys
from hal.model.training import run
from hal.model.training.trainer import Trainer

plain = Trainer.advance

def advance(self):
    if os.environ["RANK"] == "1" and self.iteration == 7 and os.environ.get("HAL_ATTEMPT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self)

Trainer.advance = advance
sys.exit(run.main(sys.argv[1:]))
"""


def start(*argv: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hal", "launch", "--nproc-per-node", "2", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)  # type: ignore[call-overload, no-any-return]


def losses(folder: Path) -> list[list[float]]:
    return list(json.loads((folder / "run.json").read_text())["losses"])


@pytest.mark.nightly
def test_a_killed_rank_is_started_again_and_the_run_continues_bit_equal(tmp_path: Path) -> None:
    (tmp_path / "kill.py").write_text(KILL_ONCE)
    outputs = []
    for name, restarts in (("whole", "0"), ("killed", "1")):
        script = TRAIN[:1] if name == "whole" else [str(tmp_path / "kill.py")]
        folders = ["--save", str(tmp_path / name / "save"), "--run-dir", str(tmp_path / name)]
        logs = ["--log-dir", str(tmp_path / name / "logs")]
        job = start("--max-restarts", restarts, *logs, *script, *TRAIN[1:], *folders)
        outputs.append(job.communicate(timeout=240))
        assert job.returncode == 0, outputs[-1]
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    error = outputs[1][1]
    assert "rank 1 failed first (killed by SIGKILL); the workers start again (0 of 1 restarts left)" in error
    assert "the job then succeeded; what happened: rank 1 failed first (killed by SIGKILL)" in error
    assert "iterations 7 to 12" in (tmp_path / "killed" / "logs" / "worker_0.log").read_text()


@pytest.mark.slow
def test_wrong_options_are_not_tried_again(tmp_path: Path) -> None:
    job = start("--max-restarts", "3", "--log-dir", str(tmp_path), *TRAIN, "--lr", "-1")
    _, error = job.communicate(timeout=120)
    assert job.returncode == 2 and "start again" not in error


@pytest.mark.slow
def test_restarts_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("import sys\nsys.exit(3)\n")
    job = start("--max-restarts", "2", "--log-dir", str(tmp_path), str(tmp_path / "fail.py"))
    _, error = job.communicate(timeout=120)
    assert job.returncode == 3 and error.count("the workers start again") == 2
    assert "the job has failed; what happened: rank" in error


SLOW_STOP = """
import os, signal, sys, time
from hal.launch.worker import expect_stop
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if len(sys.argv) > 2:
    expect_stop(float(sys.argv[2]))
print("ready", flush=True)
while not asked:
    time.sleep(0.05)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "grace, asked, seconds, code",
    [
        pytest.param("2", (), "60", 143, id="too short", marks=pytest.mark.slow),
        pytest.param("60", (), "5", 0, id="given", marks=pytest.mark.slow),
        # Longer than the default of 30 s, hence every night only.
        pytest.param(None, ("36",), "33", 0, id="asked for by the workers", marks=pytest.mark.nightly),
    ],
)
def test_workers_have_the_grace_to_stop(
    tmp_path: Path, grace: str | None, asked: tuple[str, ...], seconds: str, code: int
) -> None:
    (tmp_path / "stop.py").write_text(SLOW_STOP)
    option = [] if grace is None else ["--exit-signal-grace", grace]
    job = start(*option, "--log-dir", str(tmp_path), str(tmp_path / "stop.py"), seconds, *asked)
    while any("ready" not in p.read_text() for p in tmp_path.glob("worker_*.log")) or not (
        (tmp_path / "worker_0.log").exists() and (tmp_path / "worker_1.log").exists()
    ):
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, error = job.communicate(timeout=120)
    # Workers that were not killed end with 0 after their sleep, so the code says which happened.
    assert job.returncode == code, error
    assert ("were killed; raise --exit-signal-grace" in error) == (code != 0)


@pytest.mark.slow
def test_files_beside_the_user_hide_no_module_and_no_port_is_open(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('the wrong json')\n")
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "show.py").write_text(
        "import json, os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(type(dist.distributed_c10d._get_default_store()).__name__, os.environ['MASTER_PORT'])\n"
        "store = os.environ['HAL_STORE']\n"
        "print(oct(os.stat(store).st_mode & 0o777), json.__file__)\n"
    )
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    command = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; from hal.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["launch", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"), "script/show.py"]
    done = subprocess.run(
        [sys.executable, "-c", command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "0o700" in done.stdout and "the wrong json" not in done.stderr


@pytest.mark.slow
def test_what_a_killed_launcher_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    job = start("--log-dir", str(tmp_path / "logs"), str(tmp_path / "wait.py"), env=environment)
    log = tmp_path / "logs" / "worker_0.log"
    while not (log.exists() and "ready" in log.read_text()):
        time.sleep(0.05)
    job.kill()
    job.communicate()
    assert len(list(temporary.glob("hal-agent-*"))) == 1
    time.sleep(1.1)
    (tmp_path / "say.py").write_text("print('said')\n")
    assert start("--log-dir", str(tmp_path / "logs"), str(tmp_path / "say.py"), env=environment).wait(60) == 0
    assert list(temporary.glob("hal-agent-*")) == []


def test_leftovers_are_removed_after_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, age in (("old", 60), ("future", -3600), ("new", 0)):
        (tmp_path / f"hal-agent-{name}").mkdir()
        os.utime(tmp_path / f"hal-agent-{name}", (time.time() - age,) * 2)
    with agent._scratch() as scratch:
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["hal-agent-new", scratch.name])
    assert [p.name for p in tmp_path.iterdir()] == ["hal-agent-new"]


@pytest.mark.nightly
def test_a_job_goes_on_with_fewer_nodes(tmp_path: Path) -> None:
    """Two launchers on this machine stand in for two nodes; the second is killed with its workers."""
    save = [
        "--save",
        str(tmp_path / "save"),
        "--run-dir",
        str(tmp_path / "run"),
        "--distributed-timeout-minutes",
        "0.3",
    ]
    options = [*TRAIN, *save, "--global-batch-size", "4", "--train-iters", "120"]
    options[options.index("--tensor-model-parallel-size") + 1] = "1"
    nodes = []
    for rank in ("0", "1"):
        words = ["--nnodes", "1:2", "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", "29631"]
        words += ["--max-restarts", "3", "--cluster-timeout", "60", "--log-dir", str(tmp_path / f"logs{rank}")]
        command = [sys.executable, "-m", "hal", "launch", "--nproc-per-node", "1", *words, *options]
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    while not (tmp_path / "save" / "iter_0000006").exists():
        assert nodes[0].poll() is None, nodes[0].communicate()
        time.sleep(0.1)
    nodes[1].kill()
    output, error = nodes[0].communicate(timeout=300)
    nodes[1].communicate()
    assert nodes[0].returncode == 0, error + output[-2000:]
    assert "the job then succeeded; what happened:" in error
    recorded = [row[0] for row in losses(tmp_path / "run")]
    assert recorded == list(range(1, 121))
