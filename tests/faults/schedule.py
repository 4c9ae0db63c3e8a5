"""A seeded schedule of faults on training jobs; after each, no checkpoint may be lost and the trajectory is bit-equal.

`python tests/faults/schedule.py --events 200 --seed 1` prints one line per fault and a table; `make faults` also writes
the page. A fault is injected when the run has written a random number of further checkpoints. Invariants after each:
- the newest intact checkpoint loads, and is not older than the newest before the fault that was not damaged
- the files of every checkpoint (weights, optimizer state) have the bytes that they have without faults, and so have the
  recorded losses and gradient norms
- no process, shared memory or open port of the job is left; temporary folders are removed when the run is complete
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hal.model.checkpoint import reader

ITERATIONS = 40
MODEL = ["--backend", "cpu_ref", "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"]
MODEL += ["--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "4", "--sample-tokens", "0"]
MODEL += ["--train-iters", str(ITERATIONS), "--distributed-timeout-minutes", "0.5"]
LAYOUTS = {
    "tp2 pp2": (4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
    "dp2 zero": (2, ["--use-distributed-optimizer", "--async-save"]),
}
FATAL = ("kill a rank", "kill the launcher", "ask to stop", "full disk")
DAMAGES = ("damage the newest", "cut off a file", "lose a file", "lose the tracker", "wrong file times")
PASSING = ("stop a rank for 3 s", "slow down a rank", "clock jump")
"""Faults that the job must survive: it continues, and the next fault is injected into it."""
KINDS = FATAL + DAMAGES + PASSING
PAGE = Path(__file__).resolve().parents[2] / "docs" / "verified" / "faults.md"


class Expected(NamedTuple):
    """A run without faults, by iteration: (loss, gradient norm), and the checksums of a checkpoint's tensor files."""

    steps: dict[int, tuple[float, float]]
    files: dict[int, dict[str, str]]


class Job:
    """A training job of one layout in a folder, which is started again after each fault that ends it."""

    def __init__(self, layout: str, folder: Path, clock: Path, save_interval: int = 2) -> None:
        self.count, self.options = LAYOUTS[layout]
        self.options = [*self.options, "--save-interval", str(save_interval)]
        self.folder, self.save, self.offset = folder, folder / "save", folder / "clock"
        self.clock = clock
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "hal", "launch", "--nproc-per-node", str(self.count)]
        command += ["--log-dir", str(self.folder / "logs"), "train", *MODEL, *self.options]
        command += ["--save", str(self.save), "--load", str(self.save), "--run-dir", str(self.folder / "run")]
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        if not self.offset.exists():
            self.offset.write_bytes(struct.pack("q", 0))
        environment = {**os.environ, "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1"}
        environment |= {"LD_PRELOAD": str(self.clock), "FAULT_CLOCK": str(self.offset)}
        log = open(self.folder / "launch.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        log.close()

    @property
    def runs(self) -> bool:
        """Whether the launcher runs."""
        return self.process is not None and self.process.poll() is None

    def workers(self) -> list[int]:
        """The process ids of the workers."""
        assert self.process is not None
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def wait_for_saves(self, count: int) -> bool:
        """Waits until `count` more checkpoints are complete; False if the job ended before."""
        goal = (reader.newest(self.save) or 0) + 2 * count
        while (reader.newest(self.save) or 0) < goal:
            if not self.runs:
                return False
            time.sleep(0.02)
        return self.runs

    def end(self) -> None:
        """Waits for the job's end, which must be soon."""
        assert self.process is not None
        self.process.wait(180)

    def strike(self, kind: str, draw: random.Random) -> int:
        """Injects one fault; returns when the job has ended, or goes on after a passing one. The result is the
        iteration of the newest checkpoint that must be there afterwards."""
        assert self.process is not None
        ranks, before = self.workers(), reader.newest(self.save) or 0
        if kind in DAMAGES:
            while len(reader.iterations(self.save)) < 2:  # one checkpoint must stay intact
                time.sleep(0.02)
            self.process.kill()
            self.end()
            return self._damage(kind, draw)
        if kind == "kill a rank":
            os.kill(draw.choice(ranks), signal.SIGKILL)
        elif kind == "kill the launcher":
            self.process.kill()
        elif kind == "ask to stop":
            self.process.terminate()
        elif kind == "full disk":
            for rank in ranks:  # every write beyond 512 bytes of a file fails, as on a full disk
                subprocess.run(["prlimit", "--pid", str(rank), "--fsize=512"], check=False)
        elif kind == "clock jump":
            jump = draw.choice((-86400, -3600, -7, 7, 3600, 86400 * 365))
            (now,) = struct.unpack("q", self.offset.read_bytes())
            with open(self.offset, "r+b") as file:  # in place, because the workers have it mapped
                file.write(struct.pack("q", now + jump))
        else:
            for _ in range(1 if kind == "stop a rank for 3 s" else 30):
                with contextlib.suppress(ProcessLookupError):  # the run may be complete before
                    rank = draw.choice(ranks) if kind == "stop a rank for 3 s" else ranks[-1]
                    os.kill(rank, signal.SIGSTOP)
                    time.sleep(3 if kind == "stop a rank for 3 s" else 0.1)
                    os.kill(rank, signal.SIGCONT)
                    time.sleep(0.02)
        if kind in FATAL:
            self.end()
        return before

    def _damage(self, kind: str, draw: random.Random) -> int:
        """Changes files of the newest checkpoint; the result is that of `strike`."""
        # Not one that was renamed when the job was killed, and that the tracker file does not name yet.
        newest = reader.newest(self.save) or 0
        complete = [n for n in reader.iterations(self.save) if n <= newest]
        files = sorted(p for p in reader.folder_of(self.save, newest).rglob("*") if p.is_file() and p.stat().st_size)
        if kind == "lose the tracker":
            (self.save / reader.LATEST).unlink(missing_ok=True)
            return newest
        if kind == "wrong file times":
            for path in (self.save, *self.save.rglob("*")):
                os.utime(path, (2**31 - 10, 2**31 - 10) if draw.random() < 0.5 else (1, 1))
            return newest
        path = draw.choice(files)
        content = bytearray(path.read_bytes())
        if kind == "lose a file":
            path.unlink()
        elif kind == "cut off a file":
            path.write_bytes(content[: draw.randrange(len(content))])
        else:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
        return complete[-2]

    def steps(self) -> dict[int, tuple[float, float]]:
        """Iteration -> (loss, gradient norm), as far as they were recorded."""
        path = self.folder / "run" / "run.json"
        if not path.exists():
            return {}
        run = json.loads(path.read_text())
        norms = dict(map(tuple, run["grad_norms"]))
        return {int(n): (loss, norms[n]) for n, loss in run["losses"]}

    def files(self) -> dict[int, dict[str, str]]:
        """Iteration -> the checksums of the files with tensors. (The index and the state name folder and run.)"""
        complete = {}
        for iteration in reader.iterations(self.save):
            folder = reader.folder_of(self.save, iteration)
            complete[iteration] = {p.name: reader.file_checksum(p) for p in sorted(folder.glob("*.distcp"))}
        return complete

    def problems(self, expected: Expected, least: int) -> list[str]:
        """What is wrong after a fault that ended the job. least: iteration of a checkpoint that must be there."""
        return [*self._lost(expected, least), *self._different(expected), *self._left()]

    def _lost(self, expected: Expected, least: int) -> Iterable[str]:
        if not least and not reader.candidates(self.save):
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                folder, state = reader.read_state(self.save)
        except reader.HalError as error:
            yield f"no checkpoint loads: {error}"
            return
        if state["iteration"] < least:
            yield f"iteration {least} was saved, and {state['iteration']} is loaded"
        if self.files()[state["iteration"]] != expected.files[state["iteration"]]:
            yield f"{folder} has other tensors than without faults"

    def _different(self, expected: Expected) -> Iterable[str]:
        wrong = [n for n, step in self.steps().items() if step != expected.steps[n]]
        if wrong:
            yield f"losses or gradient norms differ from iteration {wrong[0]} on"

    def _left(self) -> Iterable[str]:
        time.sleep(0.2)  # the kernel ends the workers of a killed launcher
        listed = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
        left = [line for line in listed if str(self.folder) in line and "schedule.py" not in line]
        if left:
            yield f"{len(left)} processes are left"  # and with them the ports on which they listen
        memory = [p.name for p in Path("/dev/shm").glob("*") if self._is_of_dead(p)]
        if memory:
            yield f"shared memory is left: {memory[:3]}"

    def problems_at_the_end(self, expected: Expected) -> list[str]:
        """What is wrong after a complete run."""
        found = self.problems(expected, ITERATIONS)
        missing = sorted(set(expected.steps) - set(self.steps()))
        if missing:
            found.append(f"the losses of {len(missing)} iterations are missing, from {missing[0]} on")
        left = [p.name for p in (self.folder / "tmp").iterdir() if not p.name.startswith("torchinductor")]
        left += [p.name for p in self.save.glob(".*.tmp")]
        if left:
            found.append(f"temporary files are left: {left[:3]}")
        return found

    @staticmethod
    def _is_of_dead(path: Path) -> bool:
        words = [word for word in path.name.replace("-", "_").split("_") if word.isdigit()]
        return path.name.startswith(("hal", "torch_")) and bool(words) and not Path("/proc", words[0]).exists()


def compiled_clock(folder: Path) -> Path:
    """The library that makes the clock of a job jump."""
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def expected_results(layout: str, folder: Path, clock: Path) -> Expected:
    """The results of a run without faults."""
    job = Job(layout, folder, clock, save_interval=1)  # jobs that are requested to stop save after any iteration
    job.start()
    job.end()
    if len(job.steps()) != ITERATIONS:
        raise SystemExit(f"the run without faults failed: {(folder / 'launch.log').read_text()[-2000:]}")
    return Expected(job.steps(), job.files())


def run(events: int, seed: int, layouts: Sequence[str], root: Path) -> list[tuple[str, str, list[str]]]:
    """(layout, fault, problems) of every injected fault, printed as they happen."""
    draw, clock = random.Random(seed), compiled_clock(root)
    results: list[tuple[str, str, list[str]]] = []
    expected = {layout: expected_results(layout, root / f"whole-{n}", clock) for n, layout in enumerate(layouts)}
    jobs: dict[str, Job] = {}
    kinds: list[str] = []
    turn = 0

    def note(layout: str, kind: str, problems: list[str]) -> None:
        results.append((layout, kind, problems))
        print(f"{len(results):4d} {layout:8s} {kind:20s} {'; '.join(problems) or 'ok'}", flush=True)
        if problems:
            print((jobs[layout].folder / "launch.log").read_text()[-3000:], flush=True)

    while len(results) < events:
        layout = layouts[turn % len(layouts)]
        job = jobs.get(layout)
        if job is None:
            job = jobs[layout] = Job(layout, root / f"run-{turn}", clock)
        if not job.runs:
            job.start()
        kinds = kinds or draw.sample(KINDS, len(KINDS))  # every kind as often
        if job.wait_for_saves(draw.randint(1, 3)):
            kind = kinds.pop()
            least = job.strike(kind, draw)
            if kind in PASSING:
                note(layout, kind, list(job._different(expected[layout])))
                continue
            note(layout, kind, job.problems(expected[layout], least))
        else:  # the run is complete; the next fault is injected into a new one
            problems = job.problems_at_the_end(expected[layout])
            if problems:
                note(layout, "a run's end", problems)
            shutil.rmtree(job.folder, ignore_errors=True)
            del jobs[layout]
        turn += 1
    for layout, job in jobs.items():  # jobs that still run must end without an error
        if job.runs or (reader.newest(job.save) or 0) < ITERATIONS:
            if not job.runs:
                job.start()
            job.end()
        problems = job.problems_at_the_end(expected[layout])
        if problems:
            note(layout, "a run's end", problems)
    return results


def table(results: Sequence[tuple[str, str, list[str]]]) -> str:
    """Markdown: by fault and layout, how often it was injected, and how often something was wrong afterwards."""
    layouts = list(dict.fromkeys(layout for layout, _, _ in results))
    injected = Counter((kind, layout) for layout, kind, _ in results)
    failed = Counter(kind for _, kind, problems in results if problems)
    lines = [f"| fault | {' | '.join(layouts)} | violations |", "|---" * (len(layouts) + 2) + "|"]
    for kind in sorted({kind for _, kind, _ in results}):
        counts = " | ".join(str(injected[kind, layout]) for layout in layouts)
        lines.append(f"| {kind} | {counts} | {failed[kind]} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} in docs/verified")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hal-faults-") as name:
        results = run(options.events, options.seed, options.layout or list(LAYOUTS), Path(name))
    print(f"\n{table(results)}\n\n{_counts(results)}")
    if options.page:
        write_page(results, options.seed, time.monotonic() - began)
    return int(any(problems for _, _, problems in results))


def _counts(results: Sequence[tuple[str, str, list[str]]]) -> str:
    return f"{len(results)} faults, {sum(bool(problems) for _, _, problems in results)} violations"


def write_page(results: Sequence[tuple[str, str, list[str]]], seed: int, seconds: float) -> None:
    """Writes the results to docs/verified/faults.md."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PAGE.parent, capture_output=True, text=True).stdout
    PAGE.write_text(
        f"""# Injected faults

The results of the last `make faults`: faults on training jobs that save every second step. After each one, the newest
intact checkpoint must load and be as new as before, all checkpoints must have the same bytes and all steps the same
loss and gradient norm as without faults, and nothing of the job may be left (`tests/faults/schedule.py`). They are
valid for the commit named below, which may be older than this page.

- date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC
- commit: {commit.strip() or "unknown"}
- seed: {seed}
- machine: {platform.machine()}, {os.cpu_count()} cores; {seconds:.0f} s
- result: {_counts(results)}

{table(results)}
"""
    )


if __name__ == "__main__":
    sys.exit(main())
