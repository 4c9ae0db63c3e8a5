"""A seeded schedule of faults on training jobs; after each one, nothing may be lost and the trajectory is bit-equal.

`python tests/faults/schedule.py --events 200 --seed 1` (`make faults`) prints one line per fault and a table. A fault
strikes when the run has written a random number of further checkpoints. Invariants after each: the newest intact
checkpoint loads, every recorded loss equals that of a run without faults, and no process or shared memory of the job is
left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from hal.model.checkpoint import reader

ITERATIONS = 40
MODEL = ["--backend", "cpu_ref", "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"]
MODEL += ["--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "4", "--sample-tokens", "0"]
MODEL += ["--train-iters", str(ITERATIONS), "--save-interval", "2", "--distributed-timeout-minutes", "0.5"]
LAYOUTS = {
    "tp2 pp2": (4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
    "dp2 zero": (2, ["--use-distributed-optimizer", "--async-save"]),
}
KINDS = (
    "kill a rank",
    "kill the launcher",
    "ask to stop",
    "stop a rank for 3 s",
    "damage the newest",
    "cut off a file",
    "lose the tracker",
    "full disk",
    "clock jump",
)


class Job:
    """A training job of one layout in a folder, which is started again after each fault that ends it."""

    def __init__(self, layout: str, folder: Path) -> None:
        self.count, self.options = LAYOUTS[layout]
        self.folder, self.save = folder, folder / "save"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "hal", "launch", "--nproc-per-node", str(self.count)]
        command += ["--log-dir", str(self.folder / "logs"), "train", *MODEL, *self.options]
        command += ["--save", str(self.save), "--load", str(self.save), "--run-dir", str(self.folder / "run")]
        environment = {**os.environ, "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1"}
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        log = open(self.folder / "launch.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        log.close()

    def workers(self) -> list[int]:
        """The process ids of the workers."""
        assert self.process is not None
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def wait_for_saves(self, count: int) -> bool:
        """Waits until `count` more checkpoints are complete; False if the job ended before."""
        assert self.process is not None
        goal = (reader.newest(self.save) or 0) + 2 * count
        while (reader.newest(self.save) or 0) < goal:
            if self.process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def end(self) -> None:
        """Waits for the job's end; it must come soon."""
        assert self.process is not None
        self.process.wait(180)

    def strike(self, kind: str, draw: random.Random) -> None:
        """Injects one fault, and returns when the job has ended or goes on."""
        assert self.process is not None
        ranks = self.workers()
        if kind == "kill a rank" and ranks:
            os.kill(draw.choice(ranks), signal.SIGKILL)
        elif kind == "kill the launcher":
            self.process.kill()
        elif kind == "ask to stop":
            self.process.terminate()
        elif kind == "stop a rank for 3 s" and ranks:
            rank = draw.choice(ranks)
            os.kill(rank, signal.SIGSTOP)
            time.sleep(3)
            os.kill(rank, signal.SIGCONT)
            return
        elif kind == "full disk" and ranks:
            for rank in ranks:  # every write of more than a block fails, as on a full disk
                subprocess.run(["prlimit", "--pid", str(rank), "--fsize=512"], check=False)
        else:
            self.process.kill()
            self.end()
            self._change_files(kind, draw)
            return
        self.end()

    def _change_files(self, kind: str, draw: random.Random) -> None:
        newest = reader.folder_of(self.save, reader.newest(self.save) or 0)
        files = sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size)
        if kind == "lose the tracker":
            (self.save / reader.LATEST).unlink(missing_ok=True)
        elif kind == "clock jump":
            for path in (self.save, *self.save.rglob("*")):
                os.utime(path, (2**31 - 10, 2**31 - 10) if draw.random() < 0.5 else (1, 1))
        elif files and len(reader.iterations(self.save)) > 1:  # one checkpoint must stay intact
            path = draw.choice(files)
            content = bytearray(path.read_bytes())
            if kind == "cut off a file":
                del content[draw.randrange(len(content)) :]
            else:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)

    def losses(self) -> dict[int, float]:
        """Iteration -> loss, as far as they were recorded."""
        path = self.folder / "run" / "run.json"
        return {int(n): loss for n, loss in json.loads(path.read_text())["losses"]} if path.exists() else {}

    def problems(self, expected: dict[int, float]) -> list[str]:
        """What is wrong after the job has ended."""
        found = []
        if reader.candidates(self.save):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    reader.read_state(self.save)
            except reader.HalError as error:
                found.append(f"no checkpoint loads: {error}")
        wrong = [n for n, loss in self.losses().items() if loss != expected[n]]
        if wrong:
            found.append(f"losses differ from iteration {wrong[0]} on")
        time.sleep(0.2)  # the kernel ends the workers of a killed launcher
        listed = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
        left = [line for line in listed if str(self.folder) in line and "schedule.py" not in line]
        if left:
            found.append(f"{len(left)} processes are left")
        memory = [p.name for p in Path("/dev/shm").glob("*") if self._is_of_dead(p)]
        if memory:
            found.append(f"shared memory is left: {memory[:3]}")
        return found

    @staticmethod
    def _is_of_dead(path: Path) -> bool:
        words = [word for word in path.name.replace("-", "_").split("_") if word.isdigit()]
        return path.name.startswith(("hal", "torch_")) and bool(words) and not Path("/proc", words[0]).exists()


def expected_losses(layout: str, folder: Path) -> dict[int, float]:
    """The losses of a run without faults."""
    job = Job(layout, folder)
    job.start()
    job.end()
    losses = job.losses()
    if len(losses) != ITERATIONS:
        raise SystemExit(f"the run without faults failed: {(folder / 'launch.log').read_text()[-2000:]}")
    return losses


def run(events: int, seed: int, layouts: list[str], root: Path) -> list[tuple[str, str, list[str]]]:
    """(layout, fault, problems) of every injected fault, printed as they happen."""
    draw, results = random.Random(seed), []
    expected = {layout: expected_losses(layout, root / f"whole-{n}") for n, layout in enumerate(layouts)}
    jobs: dict[str, Job] = {}
    kinds: list[str] = []
    while len(results) < events:
        layout = layouts[len(results) % len(layouts)]
        kinds = kinds or draw.sample(KINDS, len(KINDS))  # every kind as often
        job = jobs.setdefault(layout, Job(layout, root / f"run-{len(results)}"))
        job.start()
        if job.wait_for_saves(draw.randint(1, 3)):
            kind = kinds.pop()
            job.strike(kind, draw)
            if job.process is not None and job.process.poll() is None:
                job.process.terminate()
                job.end()
            problems = job.problems(expected[layout])
            results.append((layout, kind, problems))
            print(f"{len(results):4d} {layout:8s} {kind:20s} {'; '.join(problems) or 'ok'}", flush=True)
        else:  # the run is complete; the next fault strikes a new one
            problems = job.problems(expected[layout])
            if (reader.newest(job.save) or 0) < ITERATIONS or problems:
                results.append((layout, "a run's end", problems or ["the run ended early"]))
                print(results[-1], (job.folder / "launch.log").read_text()[-1500:], flush=True)
            shutil.rmtree(job.folder, ignore_errors=True)
            del jobs[layout]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hal-faults-") as name:
        results = run(options.events, options.seed, options.layout or list(LAYOUTS), Path(name))
    failed = Counter(kind for _, kind, problems in results if problems)
    print("\n| fault | injected | violations |\n|---|---|---|")
    for kind, count in sorted(Counter(kind for _, kind, _ in results).items()):
        print(f"| {kind} | {count} | {failed[kind]} |")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
