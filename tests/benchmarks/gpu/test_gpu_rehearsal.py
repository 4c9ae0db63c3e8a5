"""`make gpu` as a whole, on the CUDA simulator: every part, the report, an interruption and a continuation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hal.backends.cuda import Cuda
from hal.bench.gpu import gpu_report, parts, store

pytestmark = pytest.mark.nightly


def command(out: Path, *arguments: str) -> list[str]:
    if not Cuda(simulate=True).probe().ok:
        pytest.skip("no C++ compiler")
    return [sys.executable, "-m", "hal.bench.gpu.run", "--simulate", "--out", str(out), *arguments]


@pytest.mark.parametrize("part", gpu_report.PARTS)
def test_a_rehearsed_part_passes(tmp_path: Path, part: str) -> None:
    done = subprocess.run(
        command(tmp_path, "--limit", "3000", part), cwd=parts.ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = store.load(tmp_path / "cuda-simulator.json")
    assert report["parts"][part]["state"] == "complete" and gpu_report.rows(report, part)
    assert "a rehearsal on the simulator" in (tmp_path / "cuda-simulator.md").read_text()
    assert "nothing here is about a GPU" in (tmp_path / "cuda-simulator-verdict.md").read_text()


def test_a_rehearsal_that_is_killed_continues(tmp_path: Path) -> None:
    """Parent and child are killed together, as when a machine is taken back."""
    path, part = tmp_path / "cuda-simulator.json", "large"
    job = subprocess.Popen(command(tmp_path, part), cwd=parts.ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        while not _finished(path, part):
            assert job.poll() is None, "the run ended before it was killed"
            time.sleep(0.05)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    kept = _finished(path, part)
    unfinished = store.load(path)
    assert unfinished["parts"][part]["state"] == "running"
    assert "has not finished" in gpu_report.failures(unfinished, [part])[0]
    done = subprocess.run(command(tmp_path, part), cwd=parts.ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "is extended" in done.stdout
    ran = [line[3:] for line in done.stdout.splitlines() if line.startswith("-- ")]
    assert ran and not set(ran) & set(kept) and [*kept, *ran] == list(store.load(path)["parts"][part]["units"])


def _finished(path: Path, part: str) -> list[str]:
    """The units of a part that have finished."""
    if not path.exists() or part not in store.load(path)["parts"]:
        return []
    return [name for name, unit in store.load(path)["parts"][part]["units"].items() if unit["done"]]
