"""Runs the parts of a CI or nightly run, which are make targets, and prints the duration and the tests of each.

    .ci/parts.py ci          what .ci/run runs
    .ci/parts.py nightly     tests that take too long for CI; writes docs/verified/nightly.md
    .ci/parts.py nightly production mutation   only these of its parts; the page keeps the rows of the others
    .ci/parts.py test-slow   one part

Stages run in order, quick ones first; the parts of a stage run in parallel. A failing part does not stop the others.
The last line counts tests; a part that fails without a failed test counts as one failure.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGES = {
    "ci": (
        ("lint", "docs", ".venv-sim/.ready"),
        ("test",),
        ("test-slow",),
        ("test-simulators",),
        ("sanitize", "test-opencl"),
        ("nightly-sample",),
    ),
    "nightly": (
        (".venv-sim/.ready",),
        ("nightly-tests",),
        ("nightly-simulators",),
        ("production",),
        ("fuzzers",),
        ("faults",),
        ("test-aarch64",),
        ("mutation",),
    ),
}
PAGE = ROOT / "docs" / "verified" / "nightly.md"

_COUNT = r"\d+ (?:passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?|rerun)"
_SUMMARY = re.compile(rf"=*\s*((?:{_COUNT}, )*{_COUNT}) in \d[\d.:]*s")
_RESULT = re.compile(r"\w+(?: \(simulated\))?: \d+ pass\b.*|[\d.]+% of \d+ mutants killed.*|\d+ faults, \d+ violations")
"""The last lines of `hal parity`, the mutation run and the run of faults, which the nightly page quotes."""


@dataclass
class Result:
    """The result of one part. counts: number of tests by outcome; empty for a part that runs no tests. quoted: lines of
    its output that state a result in other words.
    """

    part: str
    code: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    quoted: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        """Adds the counts of the summary line of a pytest session, or a line to quote."""
        if _RESULT.fullmatch(line.strip()):
            self.quoted.append(line.strip())
        match = _SUMMARY.match(line.strip())
        for count in match[1].split(", ") if match else ():
            number, outcome = count.split()
            self.counts["failed" if outcome.startswith("error") else outcome] += int(number)

    @property
    def failed(self) -> int:
        return max(self.counts["failed"], int(self.code != 0))

    def cells(self) -> list[str]:
        tests = [self.counts["passed"], self.failed, self.counts["skipped"]]
        return [self.part, f"{self.seconds:.0f}", *(str(n) if self.counts or self.code else "-" for n in tests)]


HEAD = ["part", "seconds", "passed", "failed", "skipped"]


def run_part(part: str, command: Sequence[str], say: Callable[[str], None]) -> Result:
    """Runs a command, passes every line of its output to `say`, and counts the tests it reports."""
    result, began = Result(part), time.monotonic()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line)
            result.read(line)
    result.code, result.seconds = process.returncode, time.monotonic() - began
    return result


def run_stages(
    stages: Sequence[Sequence[str]],
    command: Callable[[str], Sequence[str]],
    after: Callable[[list[Result]], None] = lambda results: None,
) -> list[Result]:
    """The results of all parts in order; output lines of parts that run in parallel begin with the part's name.

    after: called after each stage with the results so far.
    """

    def run(alone: bool, part: str) -> Result:
        def say(line: str) -> None:
            sys.stdout.write(line if alone else f"[{part}] {line}")
            sys.stdout.flush()

        say(f"=== {part}\n")
        return run_part(part, command(part), say)

    results: list[Result] = []
    for stage in stages:
        with ThreadPoolExecutor(len(stage)) as pool:
            results += pool.map(partial(run, len(stage) == 1), stage)
        after(results)
    return results


def table(results: Sequence[Result]) -> str:
    rows = [HEAD, *(r.cells() for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return "\n".join(
        " ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    )


def total(results: Sequence[Result]) -> str:
    return f"{sum(r.counts['passed'] for r in results)} passed, {sum(r.failed for r in results)} failed"


def machine() -> str:
    """The machine's class, in words."""
    cpu = re.search(r"(?m)^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"(?m)^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    cores, gib = os.cpu_count(), round(int(memory[1]) / 2**20) if memory else 0
    return f"{cpu[1].strip() if cpu else os.uname().machine}, {cores} cores, {gib} GiB"


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    # The pages that a run writes are not part of what it covers.
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/verified")
    return (git("rev-parse", "HEAD") or "unknown") + (" with local changes" if changed else "")


PAGE_HEAD = ["part", *HEAD[1:], "result", "commit", "date", "machine"]


def kept_rows(text: str) -> dict[str, str]:
    """The rows of an earlier page, by part."""
    rows = (line for line in text.splitlines() if line.startswith("| ") and line.count("|") == len(PAGE_HEAD) + 1)
    return {row.split("|")[1].strip(): row for row in rows if row.split("|")[1].strip() != PAGE_HEAD[0]}


def page(results: Sequence[Result], date: str, commit: str, machine: str, before: str = "") -> str:
    """docs/verified/nightly.md. before: the page until now, whose rows of parts that did not run are kept."""
    rows = kept_rows(before)
    for r in results:
        if not r.part.startswith("."):  # an environment
            rows[r.part] = f"| {' | '.join([*r.cells(), '; '.join(r.quoted), commit, date, machine])} |"
    order = [part for stage in STAGES["nightly"] for part in stage if part in rows]
    return f"""# The nightly run

The results of `make nightly`, which runs the tests that take too long for CI. The parts are targets of the Makefile;
`nightly-tests` and `nightly-simulators` are the tests marked `nightly`. A row is valid for its commit, which may be
older than this page: parts may be run separately (`make nightly PARTS="production mutation"`).

| {" | ".join(PAGE_HEAD)} |
|{"---|" * len(PAGE_HEAD)}
{chr(10).join(rows[part] for part in order)}
"""


def main(which: str, *chosen: str) -> int:
    at, here, date = commit(), machine(), datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    stages = STAGES.get(which, ((which,),))
    if unknown := set(chosen) - {part for stage in stages for part in stage}:
        raise SystemExit(f"{which} has no part {', '.join(sorted(unknown))}; parts: {stages}")
    if chosen:
        stages = tuple(tuple(p for p in stage if p in chosen or p.startswith(".")) for stage in stages)
        stages = tuple(stage for stage in stages if stage)

    def write(results: list[Result]) -> None:
        # After every stage, because a run that is stopped should keep the results of hours.
        PAGE.write_text(page(results, date, at, here, PAGE.read_text() if PAGE.exists() else ""))

    keep = (write,) if which == "nightly" else ()
    results = run_stages(stages, lambda part: ["make", "--no-print-directory", part], *keep)
    if which == "nightly":
        print(f"wrote {PAGE.relative_to(ROOT)}; commit it by hand")
    print(f"\n{table(results)}\n\n{total(results)}")
    return int(any(r.failed for r in results))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
