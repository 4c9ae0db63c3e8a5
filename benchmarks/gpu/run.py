"""`make gpu`: runs everything that needs an NVIDIA GPU and writes docs/verified/cuda-<device>.json and its pages.

parity: the conformance kit. checks: features that the simulator lacks. kernels, large, train_step, attention:
comparisons of time, each of which first checks its values. training: a run whose losses must match cpu_ref's. multi:
collectives, layouts and overlap on two GPUs. By default all parts run for which the machine has GPUs.

Each part runs in a separate process, and in a new one after each unit that ends its process, for at most --limit
seconds. Rows are written as soon as they are available. An existing report of this device is extended: units that ran
with the present sources are kept, so that an interrupted part continues, and replace those of other sources one by one;
a part all of whose units are of the present sources runs again. --missing keeps units of any sources; the report names
the commit of every kept one. The exit code is 0 if all requested parts ran
without a failure, 1 if not, and 2 without a GPU. Ratios do not affect it; the report only marks those that miss a goal:
85 % of the measured copy bandwidth, and no kernel of torch being faster. The page -verdict.md says which claims of the
docs hold.

--simulate rehearses all of this on the CUDA simulator at small sizes; its report goes to build/gpu.
"""

from __future__ import annotations

import argparse
import contextlib
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

from . import gpu_report, parts, preflight, store
from .gpu_report import COMPLETE, NOT_RUN, PARTS, RUNNING, STOPPED, GpuRow, PartRecord, Report, UnitRecord
from .rehearsal import Gpu, Rehearsal

ROOT = parts.ROOT
VERIFIED, REHEARSED = ROOT / "docs" / "verified", ROOT / "build" / "gpu"
LIMIT = 480.0
"""The seconds of a part: machines may be lent for ten minutes at a time."""
BROKEN = 75
"""Exit code of a part's process after a unit that left its CUDA context unusable."""
GRACE = 10.0
"""The seconds that an interrupted process has to end."""
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
    parser.add_argument("--out", type=Path, metavar="DIR", help="the report's folder: docs/verified (build/gpu)")
    parser.add_argument("--simulate", action="store_true", help="rehearse on the CUDA simulator, at small sizes")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="of a part; default %(default)g")
    parser.add_argument("--missing", action="store_true", help="run only the units that the report has of no sources")
    # For this program's own child processes.
    parser.add_argument("--child-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--about", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    gpu = Rehearsal() if args.simulate else Gpu()
    if args.about:
        try:
            print(json.dumps(about(gpu)))
        except hal.HalError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    if args.child_of:
        return run_units(args.child_of, args.parts[0], gpu, args.missing)
    device = machine(gpu)
    if isinstance(device, str):
        print(f"make gpu: {device}", file=sys.stderr)
        return 2
    out = args.out or (REHEARSED if args.simulate else VERIFIED)
    return run_parts(device, args.parts or parts_for(device), out.resolve(), args.limit, args.missing)


def parts_for(device: dict[str, Any]) -> list[str]:
    """The parts that this machine can run: all, or all but "multi" with fewer GPUs than it has processes."""
    return [part for part in PARTS if part != "multi" or device["devices"] >= parts.RANKS]


def machine(gpu: Gpu) -> dict[str, Any] | str:
    """`about`, or the reason why it is not available. It runs in a child process, because a CUDA context of the parent
    would use device memory during all parts."""
    probe = Cuda(simulate=gpu.simulated).probe()
    if not probe.ok:
        return probe.reason
    child = subprocess.run(command(gpu.simulated, "--about"), cwd=ROOT, capture_output=True, text=True, check=False)
    if child.returncode:
        return (child.stderr.strip().splitlines() or [f"the device cannot be asked: {ended(child.returncode)}"])[-1]
    return json.loads(child.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def about(gpu: Gpu) -> dict[str, Any]:
    """The device and the software versions. Initialises CUDA. Raises HalError if the backend cannot be used."""
    return {
        **gpu.about(),
        "simulated": gpu.simulated,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "sources": sources(),
        "torch": str(torch.__version__),
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


def command(simulated: bool, *arguments: str) -> list[str]:
    """This program as a child process, with arguments that are not for users."""
    return [sys.executable, "-m", "hal.bench.gpu.run", *(["--simulate"] if simulated else []), *arguments]


def ended(code: int) -> str:
    """A description of how a process ended."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def run_parts(device: dict[str, Any], names: Sequence[str], out: Path, limit: float, missing: bool) -> int:
    """Runs the parts (missing: their units without a record), prints the failures, and returns the exit code."""
    path = store.path_of(out, device["device"])
    print(store.begin(path, device), flush=True)
    for part in (part for part in PARTS if part in names):
        print(f"== {part}", flush=True)
        run_part(path, part, device, limit, missing)
    report = store.load(path)
    failures = gpu_report.failures(report, names)
    left = [part for part in PARTS if part not in report["parts"]]
    print("\n".join(failures) or f"no failures in {', '.join(names)}")
    if left:
        print(f"parts that have not run yet: {', '.join(left)}")
    print(f"wrote {path}, {' and '.join(page.name for page in store.pages_of(path))}", flush=True)
    return 1 if failures else 0


def run_part(path: Path, part: str, device: dict[str, Any], limit: float, missing: bool) -> None:
    """Runs a part, in one or more processes, to its end or for `limit` seconds."""
    why = preflight.lacking(part)
    if part == "multi" and device["devices"] < parts.RANKS:
        why = f"it needs {parts.RANKS} GPUs, this machine has {device['devices']}"
    if why:
        _update(path, part, {"units": {}, "seconds": 0.0, "state": NOT_RUN, "why": why, "current": ""})
        return
    begin_part(path, part, missing)
    begin, at_first = time.monotonic(), _units_done(path, part)
    more, before = True, -1
    child = command(device.get("simulated", False), part, *(["--missing"] if missing else []), "--child-of", str(path))
    # Stop when a process finishes no unit; otherwise a part whose process cannot start would be restarted forever.
    while more and (done := _units_done(path, part)) > before:
        before, start = done, time.monotonic()
        code = _run_child(child, begin + limit - start)
        if code is None:
            end_at_limit(path, part, time.monotonic() - start, limit, _units_done(path, part) > at_first)
            return
        more = end_process(path, part, code, time.monotonic() - start)
    if more:
        record = store.load(path)["parts"][part]
        _update(path, part, {**record, "state": STOPPED, "why": "its last process did not finish a unit"})


def _run_child(arguments: Sequence[str], seconds: float) -> int | None:
    """The exit code of a process, or None if it was interrupted because the time was over."""
    child = subprocess.Popen(arguments, cwd=ROOT)
    try:
        return child.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        # An interrupt, so that it ends the processes that it has started itself.
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
        return None
    finally:
        child.kill()
        child.wait()


def begin_part(path: Path, part: str, missing: bool) -> None:
    """Adds a new record, or continues one that has units of other sources or of a run that did not finish."""
    report = store.load(path)
    record, sources = report["parts"].get(part), report["machine"]["sources"]
    if record is None or record["state"] == NOT_RUN:
        record = {"units": {}, "seconds": 0.0, "state": RUNNING, "why": "", "current": ""}
    elif not missing and record["state"] == COMPLETE:
        if all(unit["sources"] == sources for unit in record["units"].values()):
            record["units"] = {}
        record["seconds"] = 0.0
    _update(path, part, {**record, "state": RUNNING, "why": "", "current": ""})


def end_process(path: Path, part: str, code: int, seconds: float) -> bool:
    """Records how a part's process ended; returns whether another process should continue.

    If a process ended within a unit, the unit caused it: it gets an error, and the next process continues after it.
    """
    record = store.load(path)["parts"][part]
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


def end_at_limit(path: Path, part: str, seconds: float, limit: float, advanced: bool) -> None:
    """Records that a part's time was over. The unit that was running runs again in the part's next run, unless it had
    all of the time (not `advanced`): then it gets an error, and the next run continues after it."""
    record = store.load(path)["parts"][part]
    unit = record["current"]
    record["current"] = ""
    record["seconds"] += seconds
    record["state"], record["why"] = STOPPED, f"its {limit:.0f} seconds are over; run it again: it continues"
    if unit and not advanced:
        record["units"][unit]["rows"].append({"error": f"not finished in {limit:.0f} seconds"})
        record["units"][unit]["done"] = True
    _update(path, part, record)


def _update(path: Path, part: str, record: PartRecord) -> None:
    report = store.load(path)
    report["parts"][part] = record
    store.save(path, report)


def _units_done(path: Path, part: str) -> int:
    """The finished units of the present sources."""
    report = store.load(path)
    units, sources = report["parts"][part]["units"].values(), report["machine"]["sources"]
    return sum(unit["done"] and unit["sources"] == sources for unit in units)


# The child runs the remaining units of one part.


def run_units(path: Path, part: str, gpu: Gpu, missing: bool) -> int:
    """Runs the units of a part that have not finished yet (missing: with any sources); returns its exit code."""
    report = store.load(path)
    record, sources, names = report["parts"][part], report["machine"]["sources"], set()
    try:
        for name, make in parts.UNITS[part](gpu):
            names.add(name)
            unit = record["units"].get(name)
            if unit is not None and unit["done"] and (missing or unit["sources"] == sources):
                continue
            _run_unit(path, report, record, name, make)
            if not gpu.alive():
                return BROKEN
        record["units"] = {name: unit for name, unit in record["units"].items() if name in names}
        store.save(path, report)
    except Exception as error:  # between units, e.g. while a case is created
        traceback.print_exc()
        record["why"] = parts.first_line(error)
        store.save(path, report)
        return 1
    return 0


def _run_unit(path: Path, report: Report, record: PartRecord, name: str, make: Callable[[], Iterable[GpuRow]]) -> None:
    print(f"-- {name}", flush=True)
    of_run = {key: report["machine"][key] for key in ("sources", "commit", "date")}
    unit: UnitRecord = {"done": False, "rows": [], **of_run}  # type: ignore[typeddict-item]
    record["current"], record["units"][name] = name, unit
    store.save(path, report)
    try:
        for row in make():
            print(json.dumps(row), flush=True)
            unit["rows"].append(row)
            store.save(path, report)
    except Exception as error:
        traceback.print_exc()
        unit["rows"].append({"error": parts.first_line(error)})
    unit["done"], record["current"] = True, ""
    store.save(path, report)


if __name__ == "__main__":
    sys.exit(main())
