"""`make gpu`: runs everything that needs an NVIDIA GPU and writes docs/verified/cuda-<device>.json and .md.

parity: the conformance kit. checks: features that the simulator lacks (checks.py). kernels, train_step, attention:
benchmark ratios (cases.py). training: a run whose losses must match cpu_ref's. By default all parts run.

Each part runs in a separate process, and in a new one after each unit that ends its process. Rows are written as soon
as they are available. An existing report of this device and these sources is extended: an interrupted part continues,
and a complete part runs again. The exit code is 0 if all requested parts ran without a failure, 1 if not, and 2 without
a GPU. Ratios do not affect it; the report only marks those that miss a goal. The goals are 85 % of the measured copy
bandwidth, and no kernel of torch being faster.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import hal
from hal.backends.cuda import Cuda

from . import gpu_report, parts, preflight
from .gpu_report import COMPLETE, NOT_RUN, PARTS, RUNNING, STOPPED, GpuRow, PartRecord, Report, UnitRecord

ROOT = parts.ROOT
VERIFIED = ROOT / "docs" / "verified"
BROKEN = 75
"""Exit code of a part's process after a unit that left its CUDA context unusable."""
TESTED = ("hal", "backends", "ops", "model", "benchmarks")
"""The folders of the sources that a report covers."""
SUFFIXES = {".py", ".cu", ".cpp", ".c", ".h", ".table", ".template", ".yaml"}


# The parent starts a process per part and records how each one ended.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m hal.bench.gpu.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--out", type=Path, default=VERIFIED, metavar="DIR", help="the report's folder: docs/verified")
    # For this program's own child processes.
    parser.add_argument("--child-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--about", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    if args.about:
        try:
            print(json.dumps(about()))
        except hal.HalError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    if args.child_of:
        return run_units(args.child_of, args.parts[0])
    device = machine()
    if isinstance(device, str):
        print(f"make gpu: {device}", file=sys.stderr)
        return 2
    return run_parts(device, args.parts or PARTS, args.out.resolve())


def machine() -> dict[str, Any] | str:
    """`about`, or the reason why it is not available. It runs in a child process, because a CUDA context of the parent
    would use device memory during all parts."""
    probe = Cuda(simulate=False).probe()
    if not probe.ok:
        return probe.reason
    child = subprocess.run(command("--about"), cwd=ROOT, capture_output=True, text=True, check=False)
    if child.returncode:
        return (child.stderr.strip().splitlines() or [f"the device cannot be asked: {ended(child.returncode)}"])[-1]
    return json.loads(child.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def about() -> dict[str, Any]:
    """The device and the software versions. Initialises CUDA. Raises HalError if the backend cannot be used."""
    hal.use("cuda", simulate=False)
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "sources": sources(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
    }


def sources() -> str:
    """A digest of the tested code. Unlike the commit, it does not change with other files."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in TESTED for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES):
        if not path.is_dir():
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit() -> str:
    """The checkout's commit, and whether the code differs from it; "unknown" outside a repository."""
    try:
        head, changes = (
            subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
            for args in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", *TESTED))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}{' and changes' if changes else ''}"


def command(*arguments: str) -> list[str]:
    """This program as a child process, with arguments that are not for users."""
    return [sys.executable, "-m", "hal.bench.gpu.run", *arguments]


def ended(code: int) -> str:
    """A description of how a process ended."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def run_parts(device: dict[str, Any], names: Sequence[str], out: Path) -> int:
    """Runs the parts, prints the failures, and returns the exit code."""
    path = gpu_report.path_of(out, device["device"])
    print(gpu_report.begin(path, device), flush=True)
    for part in (part for part in PARTS if part in names):
        print(f"== {part}", flush=True)
        run_part(path, part)
    report = gpu_report.load(path)
    failures = gpu_report.failures(report, names)
    left = [part for part in PARTS if part not in report["parts"]]
    print("\n".join(failures) or f"no failures in {', '.join(names)}")
    if left:
        print(f"parts that have not run yet: {', '.join(left)}")
    print(f"wrote {path} and {path.with_suffix('.md')}", flush=True)
    return 1 if failures else 0


def run_part(path: Path, part: str) -> None:
    """Runs a part to its end, in one or more processes."""
    why = preflight.lacking(part)
    if why:
        _update(path, part, {"units": {}, "seconds": 0.0, "state": NOT_RUN, "why": why, "current": ""})
        return
    begin_part(path, part)
    more, before = True, -1
    # Stop when a process finishes no unit; otherwise a part whose process cannot start would be restarted forever.
    while more and (done := _units_done(path, part)) > before:
        before, start = done, time.monotonic()
        code = subprocess.run(command(part, "--child-of", str(path)), cwd=ROOT, check=False).returncode
        more = end_process(path, part, code, time.monotonic() - start)
    if more:
        record = gpu_report.load(path)["parts"][part]
        _update(path, part, {**record, "state": STOPPED, "why": "its last process did not finish a unit"})


def begin_part(path: Path, part: str) -> None:
    """Adds a new record, or continues that of a run that did not finish."""
    record = gpu_report.load(path)["parts"].get(part)
    if record is None or record["state"] in (COMPLETE, NOT_RUN):
        record = {"units": {}, "seconds": 0.0, "state": RUNNING, "why": "", "current": ""}
    _update(path, part, {**record, "state": RUNNING, "why": "", "current": ""})


def end_process(path: Path, part: str, code: int, seconds: float) -> bool:
    """Records how a part's process ended; returns whether another process should continue.

    If a process ended within a unit, the unit caused it: it gets an error, and the next process continues after it.
    """
    record = gpu_report.load(path)["parts"][part]
    unit = record["current"]
    record["current"] = ""
    record["seconds"] += seconds
    if unit:
        record["units"][unit]["rows"].append({"error": ended(code)})
        record["units"][unit]["done"] = True
    elif code != BROKEN:
        record["state"] = STOPPED if code else COMPLETE
        record["why"] = record["why"] or (ended(code) if code else "")
    _update(path, part, record)
    return bool(unit) or code == BROKEN


def _update(path: Path, part: str, record: PartRecord) -> None:
    report = gpu_report.load(path)
    report["parts"][part] = record
    gpu_report.save(path, report)


def _units_done(path: Path, part: str) -> int:
    return sum(unit["done"] for unit in gpu_report.load(path)["parts"][part]["units"].values())


# The child runs the remaining units of one part.


def run_units(path: Path, part: str) -> int:
    """Runs the units of a part that have not finished yet; returns the process's exit code."""
    report = gpu_report.load(path)
    record = report["parts"][part]
    try:
        for name, make in parts.UNITS[part]():
            if name in record["units"] and record["units"][name]["done"]:
                continue
            _run_unit(path, report, record, name, make)
            if not parts.alive():
                return BROKEN
    except Exception as error:  # between units, e.g. while a case is created
        traceback.print_exc()
        record["why"] = parts.first_line(error)
        gpu_report.save(path, report)
        return 1
    return 0


def _run_unit(path: Path, report: Report, record: PartRecord, name: str, make: Callable[[], Iterable[GpuRow]]) -> None:
    print(f"-- {name}", flush=True)
    unit: UnitRecord = {"done": False, "rows": []}
    record["current"], record["units"][name] = name, unit
    gpu_report.save(path, report)
    try:
        for row in make():
            print(json.dumps(row), flush=True)
            unit["rows"].append(row)
            gpu_report.save(path, report)
    except Exception as error:
        traceback.print_exc()
        unit["rows"].append({"error": parts.first_line(error)})
    unit["done"], record["current"] = True, ""
    gpu_report.save(path, report)


if __name__ == "__main__":
    sys.exit(main())
