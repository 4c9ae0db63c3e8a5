"""Compares this tree with another checkout of HAL: `python -m hal.bench.harness.against CHECKOUT [SUITE ...]`.

"ours" of every case runs alternately in a worker of this tree and in one of the checkout, for five rounds. The ratio of
a round is the checkout's time (or bytes) / this tree's: 0.97 means that this tree takes 3 % longer. A case whose median
ratio is below `--require` is measured again, up to three times in total; all rounds count.

The checkout runs its own worker.py, with which this program communicates by its protocol, so the checkout may be older
than the folders of benchmarks/. Cases are matched by suite, name and shape. The exit code is 0 if every compared row
meets `--require`, 1 if one does not or could not run, and 2 if nothing was compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import hal
from hal.errors import HalError

from . import machine
from .case import OURS, Case
from .engine import LOOKS, Effort, Row, Samples, rows, sample
from .runner import SUITES, selected
from .workers import Program, Unavailable, Workers

EFFORT = Effort(rounds=9, least=9)
BEFORE, AFTER = "before", "after"
_LIST = """
import importlib, json, sys
print(json.dumps([(case.name, case.shape) for case in importlib.import_module(sys.argv[1]).cases()]))
"""


@dataclass(frozen=True)
class Checkout:
    """A working tree of HAL; its processes import `hal` from `root` instead of an installed package."""

    root: Path

    def module(self, name: str) -> str:
        """The module's name in this checkout: before benchmarks/ had folders, hal.bench.suites.X was hal.bench.X."""
        folder, _, module = name.rpartition(".")
        old = f"{folder.rpartition('.')[0]}.{module}"
        return old if (self.root / old.replace(".", "/")).with_suffix(".py").exists() else name

    def environment(self) -> dict[str, str]:
        inherited = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(self.root), *([inherited] if inherited else [])])}

    def program(self) -> Program:
        # Python puts the working directory before PYTHONPATH, so both must be set.
        return Program(self.module(Program.module), self.root, self.environment())

    def cases(self, suite: str) -> dict[tuple[str, str], int]:
        """(name, shape) -> number of every case of a suite. Raises HalError if they cannot be listed."""
        child = subprocess.run(
            [sys.executable, "-c", _LIST, self.module(SUITES[suite])],
            cwd=self.root,
            env={**os.environ, **self.environment()},
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            raise HalError(f"the cases of '{suite}' in {self.root} cannot be listed:\n{child.stderr[-2000:]}")
        return {(name, shape): i for i, (name, shape) in enumerate(json.loads(child.stdout.splitlines()[-1]))}


class Pair:
    """The workers of both trees as one `Meter`. Names of candidates are prefixed with that of the tree and a space."""

    def __init__(self, trees: Mapping[str, Workers]) -> None:
        self._trees = trees

    def _find(self, name: str) -> tuple[Workers, str]:
        tree, _, candidate = name.partition(" ")
        return self._trees[tree], candidate

    def run(self, name: str, n: int) -> float:
        workers, candidate = self._find(name)
        return workers.run(candidate, n)

    def peak(self, name: str) -> float:
        workers, candidate = self._find(name)
        return workers.peak(candidate)

    def count(self, name: str) -> float:
        workers, candidate = self._find(name)
        return workers.count(candidate)

    def start_round(self) -> None:
        self._other_load = machine.OtherLoad([os.getpid(), *(pid for w in self._trees.values() for pid in w.pids())])

    def other_load(self) -> float:
        return self._other_load.share()


def compare(
    suite: str, case: Case, allocator: str, index: Mapping[str, int], trees: Mapping[str, Workers], require: float
) -> Row:
    """Measures one case in both trees. index: its number in each tree. Raises Unavailable if one cannot run it."""
    candidates = [OURS, *([case.minus] if case.minus else [])]

    def net(times: Mapping[str, float], tree: str) -> float:
        return times[f"{tree} {OURS}"] - (times[f"{tree} {case.minus}"] if case.minus else 0.0)

    def row(samples: Samples) -> Row:
        rounds = [{OURS: net(times, AFTER), BEFORE: net(times, BEFORE)} for times in samples.rounds]
        plain = replace(case, minus="", budgets={}, ceiling="")
        (result,) = rows(suite, plain, allocator, replace(samples, rounds=rounds), goal=lambda peer: require)
        return result

    try:
        for tree, workers in trees.items():
            for name in candidates:
                workers.prepare(index[tree], case, name, allocator)
        names = [f"{tree} {name}" for tree in trees for name in candidates]
        samples = sample(case, names, Pair(trees), EFFORT)
        for _ in range(1, LOOKS):
            if case.quantity == "seconds" and not row(samples).met:
                samples += sample(case, names, Pair(trees), EFFORT)
        return row(samples)
    except KeyboardInterrupt:
        for workers in trees.values():
            workers.kill()  # the call in progress may take minutes
        raise
    finally:
        for workers in trees.values():
            workers.release()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per row as soon as it is measured, and at the end the rows that do not meet the requirement."""
    parser = argparse.ArgumentParser(
        prog="python -m hal.bench.harness.against",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="the tree to compare with")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; default: all")
    parser.add_argument("--backend", default="cpu_ref", help="default: cpu_ref")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="as in `hal bench`")
    parser.add_argument("--one-thread", action="store_true", help="as in `hal bench`")
    parser.add_argument("--require", type=float, default=0.97, metavar="RATIO", help="smallest ratio; default: 0.97")
    options = parser.parse_args(argv)
    if unknown := [suite for suite in options.suites if suite not in SUITES]:
        parser.error(f"no suite is called {', '.join(unknown)}; suites: {', '.join(SUITES)}")
    there = Checkout(options.checkout.resolve())
    if not (there.root / "hal" / "__init__.py").exists():
        parser.error(f"{there.root} is not a checkout of HAL: it has no hal/__init__.py")
    here = Checkout(Path(hal.__file__).parents[1])
    compared, failures = 0, []
    for suite in options.suites or SUITES:
        cases_there = there.cases(suite)
        cases_here = {(case.name, case.shape) for _, case in selected(suite, ())}
        for name, shape in sorted(cases_there.keys() ^ cases_here):
            print(f"{suite}: {name} {shape}: only in {'this tree' if (name, shape) in cases_here else there.root}")
        with (
            Workers(there.module(SUITES[suite]), options.backend, options.one_thread, there.program()) as before,
            Workers(SUITES[suite], options.backend, options.one_thread, here.program()) as after,
        ):
            for number, case in selected(suite, options.only):
                if (case.name, case.shape) not in cases_there:
                    continue
                index = {BEFORE: cases_there[case.name, case.shape], AFTER: number}
                for allocator in case.allocators:
                    what = f"{suite}: {case.name} {case.shape}, {allocator} malloc"
                    try:
                        trees = {BEFORE: before, AFTER: after}
                        row = compare(suite, case, allocator, index, trees, options.require)
                    except Unavailable as error:
                        failures.append(f"{what}: {error}")
                        continue
                    compared += 1
                    line = f"{what}: {row.ratio_median:.3f} ({row.ratio_min:.3f}..{row.ratio_max:.3f})"
                    print(f"{line}, clean rounds {row.clean}/{row.rounds}", flush=True)
                    failures += [] if row.met else [line]
    for failure in failures:
        print(f"below {options.require:g}, or not run: {failure}", file=sys.stderr)
    print(f"{compared} rows compared with {there.root}, {len(failures)} below {options.require:g} or not run")
    return 1 if failures else 0 if compared else 2


if __name__ == "__main__":
    sys.exit(main())
