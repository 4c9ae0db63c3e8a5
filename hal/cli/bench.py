"""`hal bench`: ratios against named peers and against the machine's limits, measured in turn in one run.

Every candidate runs in a child process under the allocator settings that its row names: "default" is glibc's own,
"pooled" is MALLOC_MMAP_MAX_=0 and a huge MALLOC_TRIM_THRESHOLD_. Times mean little on a busy machine; the column of
clean rounds shows how busy it was.

`hal bench train` with options of `hal train` (--nproc-per-node 4 --tensor-model-parallel-size 2 ...) trains under that
layout instead, on random tokens, and reports tokens/s, model FLOP/s and the peak memory of every rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .arguments import Parser, require_writable


def parser() -> Parser:
    """The options of `hal bench`."""
    from hal.bench.harness import runner

    result = Parser("bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("suite", nargs="?", default="all", choices=[*runner.SUITES, "all"], help="default: all")
    result.add_argument("--backend", default="cpu_ref", help="the backend that is compared; default: cpu_ref")
    result.add_argument("--peer", nargs="+", default=[], metavar="P", help="compare with these peers only")
    result.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="only cases whose name and shape contain a TEXT"
    )
    result.add_argument(
        "--one-thread",
        action="store_true",
        help="one thread, CPU time instead of wall-clock time: usable on a busy machine (goals are for two threads)",
    )
    result.add_argument("--json", metavar="F", help="write the rows to F")
    result.add_argument("--html", metavar="F", help="write a page with tables and growth plots to F")
    result.add_argument("--check", action="store_true", help="fail when a goal is missed")
    result.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps, with a layout")
    return result


def main(argv: Sequence[str]) -> int:
    """Exit code 1 if interrupted, or with --check if a goal was missed or could not be measured; 2 for wrong options,
    if no case matches, or with --check if no goals are recorded for the selection."""
    from hal.bench.harness import machine, report, runner
    from hal.core import registry

    command = parser()
    options, layout = command.parse_known_args(argv)
    require_writable("--json", options.json)
    require_writable("--html", options.html)
    registry.load(options.backend)  # fails here, not in a child process, if the name is unknown
    if layout and options.suite != "train":
        command.error(
            f"unrecognized arguments: {' '.join(layout)}; only `hal bench train` takes the options of hal train"
        )
    if layout:
        unused = ("peer", "only", "one_thread", "html", "check")
        given = [f"--{name.replace('_', '-')}" for name in unused if getattr(options, name)]
        if given:
            command.error(f"{', '.join(given)}: not available for a training layout ({' '.join(layout)})")
        return _layout(options, layout)
    suites = list(runner.SUITES) if options.suite == "all" else [options.suite]
    results = runner.run(
        suites,
        options.backend,
        peers=options.peer,
        only=options.only,
        one_thread=options.one_thread,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if results.interrupted:
        print("interrupted: the results below are incomplete", file=sys.stderr)
    conditions = f"{machine.describe(options.one_thread)}; backend {options.backend}"
    print(conditions)
    if results.rows:
        print(report.table(results.rows))
    for a in results.absent:
        print(f"not measured: {a.name} {a.shape} against {a.peer} ({a.allocator} malloc): {a.reason}")
    if options.json:
        Path(options.json).write_text(json.dumps([r.as_dict() for r in results.rows], indent=1) + "\n")
    if options.html:
        Path(options.html).write_text(report.html(results, conditions))
    if not results.rows and not results.absent and not results.interrupted:
        print("hal bench: no case matches the selection", file=sys.stderr)
        return 2
    for miss in results.misses:
        print(f"below its goal: {miss}", file=sys.stderr)
    if results.goals:
        print(f"{results.goals - len(results.misses)} of {results.goals} goals met")
    elif options.check and not results.interrupted:
        print(f"hal bench: no goals are recorded for this selection on backend {options.backend}", file=sys.stderr)
        return 2
    return 1 if results.interrupted or (options.check and results.misses) else 0


def _layout(options: argparse.Namespace, layout: Sequence[str]) -> int:
    """Runs one job under a layout, and prints speed and the peak memory of every rank."""
    from hal.bench.harness import machine, report
    from hal.bench.parallel import layout_run
    from hal.launch.agent import Job, run

    if options.steps < 1:
        parser().error(f"--steps must be 1 or more, got {options.steps}")
    argv = [*layout, "--backend", options.backend]
    config = layout_run.config_of(argv)  # reports wrong options before any process starts
    with tempfile.TemporaryDirectory(prefix="hal-bench-") as folder:
        output = Path(folder) / "record.json"
        environment = {layout_run.OUTPUT: str(output), layout_run.STEPS: str(options.steps)}
        command = ["-m", "hal.bench.parallel.layout_run", *argv]
        code = run(Job(command, nproc=config.nproc_per_node, log_dir=Path(folder) / "logs", environment=environment))
        if code:
            return 1
        record = {**json.loads(output.read_text()), "options": list(layout), "conditions": machine.describe()}
    print(report.layout(record))
    if options.json:
        Path(options.json).write_text(json.dumps([record], indent=1) + "\n")
    return 0
