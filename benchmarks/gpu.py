"""`make gpu`: everything that needs an NVIDIA GPU, into docs/verified/cuda-<device>.json and .md.

parity: the conformance kit. checks: what the simulator lacks (gpu_checks.py). kernels, train_step, attention: benchmark
ratios (gpu_cases.py). training: a run whose losses must follow cpu_ref's. Parts may be named; without names all run.

Each part has a process of its own, and another one after what breaks a process, from the next unit on. Rows are written
as they are known. A report that is there already, of this device and these sources, is extended: a part that was
interrupted goes on, one that was whole runs again. Exit code 0 if all parts asked for ran and hold, 1 if not, 2 without
a GPU. Ratios are reported, not judged, except that the report marks what misses its goal: 85 % of the measured copy
bandwidth, and no kernel of torch's faster.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hal
from hal.backends.cuda import Cuda

from . import gpu_parts, gpu_report
from .gpu_report import NOT_RUN, PARTS, RUNNING, STOPPED, WHOLE

ROOT = gpu_parts.ROOT
VERIFIED = ROOT / "docs" / "verified"
BROKEN = 75
"""Exit code of a part's process that recorded a unit after which its CUDA context takes no more work."""
TESTED = ("hal", "backends", "ops", "model", "benchmarks")
SUFFIXES = {".py", ".cu", ".cpp", ".c", ".h", ".table", ".template", ".yaml"}


def sources() -> str:
    """A digest of the code that is tested, which commits and changes that leave that code alone do not alter."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in TESTED for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES):
        if not path.is_dir():
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def commit() -> str:
    """The checkout's commit, and whether it was changed since; "unknown" outside a repository."""
    try:
        said = [
            subprocess.run(["git", *what], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
            for what in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", *TESTED))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{said[0]}{' and changes' if said[1] else ''}"


def about() -> dict[str, Any]:
    """This device and this software. Starts CUDA. Raises HalError if the backend cannot be used."""
    hal.use("cuda", simulate=False)
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "sources": sources(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
    }


def command(*arguments: str) -> list[str]:
    """This program in a process of its own, with arguments that are not for people."""
    return [sys.executable, "-m", "hal.bench.gpu", *arguments]


def machine() -> dict[str, Any] | str:
    """`about`, or why there is none. Another process is asked: a context of ours would stay beside the parts' own."""
    probe = Cuda(simulate=False).probe()
    if not probe.ok:
        return probe.reason
    done = subprocess.run(command("--about"), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"the device cannot be asked: {ended(done.returncode)}"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def ended(code: int) -> str:
    """How a process ended."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def begin_part(path: Path, part: str) -> None:
    """A new entry, or the one of a run that did not come to its end, from its last whole unit on."""
    report = gpu_report.load(path)
    entry = report["parts"].get(part)
    if entry is None or entry["state"] in (WHOLE, NOT_RUN):
        entry = {"units": {}, "seconds": 0.0}
    report["parts"][part] = {**entry, "state": RUNNING, "why": "", "at": ""}
    gpu_report.save(path, report)


def end_process(path: Path, part: str, code: int, seconds: float) -> bool:
    """Records how a part's process ended, and whether another one should go on.

    One that ended within a unit did so because of it.
    """
    report = gpu_report.load(path)
    entry = report["parts"][part]
    at, entry["at"] = entry["at"], ""
    entry["seconds"] += seconds
    if at:
        unit = entry["units"].setdefault(at, {"rows": []})
        unit["rows"].append({"error": ended(code)})
        unit["done"] = True
    elif code != BROKEN:
        entry["state"] = STOPPED if code else WHOLE
        entry["why"] = entry["why"] or (ended(code) if code else "")
    gpu_report.save(path, report)
    return bool(at) or code == BROKEN


def run_part(path: Path, part: str) -> None:
    """Runs a part to its end, in as many processes as that takes."""
    why = gpu_parts.lacking(part)
    if why:
        report = gpu_report.load(path)
        report["parts"][part] = {"units": {}, "seconds": 0.0, "state": NOT_RUN, "why": why, "at": ""}
        gpu_report.save(path, report)
        return
    begin_part(path, part)
    more, before = True, -1
    while more and (done := _done(path, part)) > before:
        before, began = done, time.monotonic()
        code = subprocess.run(command(part, "--within", str(path)), cwd=ROOT, check=False).returncode
        more = end_process(path, part, code, time.monotonic() - began)
    if more:
        report = gpu_report.load(path)
        report["parts"][part] |= {"state": STOPPED, "why": "its last process brought no unit to its end"}
        gpu_report.save(path, report)


def _done(path: Path, part: str) -> int:
    return sum(unit["done"] for unit in gpu_report.load(path)["parts"][part]["units"].values())


def within(path: Path, part: str) -> int:
    """Runs what is left of a part, in this process."""
    report = gpu_report.load(path)
    entry = report["parts"][part]
    try:
        for name, make in gpu_parts.UNITS[part]():
            if entry["units"].get(name, {}).get("done"):
                continue
            _unit(path, report, entry, name, make)
            if not gpu_parts.alive():
                return BROKEN
    except Exception as error:  # between units: where cases are made, say
        traceback.print_exc()
        entry["why"] = gpu_parts.first_line(error)
        gpu_report.save(path, report)
        return 1
    return 0


def _unit(path: Path, report: gpu_report.Report, entry: dict[str, Any], name: str, make: Any) -> None:
    print(f"-- {name}", flush=True)
    entry["at"], unit = name, {"done": False, "rows": []}
    entry["units"][name] = unit
    gpu_report.save(path, report)
    try:
        for row in make():
            print(json.dumps(row), flush=True)
            unit["rows"].append(row)  # type: ignore[attr-defined]
            gpu_report.save(path, report)
    except Exception as error:
        traceback.print_exc()
        unit["rows"].append({"error": gpu_parts.first_line(error)})  # type: ignore[attr-defined]
    unit["done"], entry["at"] = True, ""
    gpu_report.save(path, report)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m hal.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--out", type=Path, default=VERIFIED, metavar="DIR", help="the report's folder: docs/verified")
    parser.add_argument("--within", type=Path, help=argparse.SUPPRESS)
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
    if args.within:
        return within(args.within, args.parts[0])
    found = machine()
    if isinstance(found, str):
        print(f"make gpu: {found}", file=sys.stderr)
        return 2
    return _run(found, args.parts or PARTS, args.out.resolve())


def _run(found: dict[str, Any], parts: Sequence[str], out: Path) -> int:
    path = gpu_report.path_of(out, found["device"])
    print(gpu_report.begin(path, found), flush=True)
    for part in (part for part in PARTS if part in parts):
        print(f"== {part}", flush=True)
        run_part(path, part)
    report = gpu_report.load(path)
    wrong = gpu_report.failures(report, parts)
    left = [part for part in PARTS if part not in report["parts"]]
    print("\n".join(wrong) or f"everything holds of {', '.join(parts)}")
    if left:
        print(f"parts that have not run yet: {', '.join(left)}")
    print(f"wrote {path} and {path.with_suffix('.md')}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
