"""`make npu`: checks what HAL claims of Ascend devices and writes docs/verified/npu-<device>.json and .md.

Needs no network. Every claim runs in a process of its own, and the report is written after each, so that an interrupted
run continues: claims that were confirmed or measured on this device with these sources are not checked again, unless
--again is given. The exit code is 0 if no claim is refuted, 1 if one is, and 2 without a device. --simulate checks the
program itself, with small sizes; such a report goes to the folder of --out, which is then required.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hal.backends.npu import Npu

from ..gpu.run import VERIFIED, commit, sources
from .claims import CONFIRMED, MEASURED, PARTS, REFUTED, ROOT, Claim, claims, environment

SECONDS = 900
"""The time limit of one claim."""


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the claims of the parts that are asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m hal.bench.npu.npu_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, or names of claims; default all")
    parser.add_argument("--simulate", action="store_true", help="on the simulator, with small sizes")
    parser.add_argument("--again", action="store_true", help="check claims again that an earlier run has settled")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the report's folder: docs/verified")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # for this program's own child processes
    args = parser.parse_args(argv)
    listed = claims()
    if args.only:
        return check(next(claim for claim in listed if claim.name == args.only), args.simulate)
    known = {*PARTS, *(claim.name for claim in listed)}
    if set(args.parts) - known:
        parser.error(
            f"no part or claim is called {', '.join(sorted(set(args.parts) - known))}; parts: {', '.join(PARTS)}"
        )
    if args.simulate and args.out is None:
        parser.error("--simulate needs --out: docs/verified holds what devices have shown")
    probe = Npu(simulate=args.simulate).probe()
    if not probe.ok:
        print(f"make npu: {probe.reason}", file=sys.stderr)
        return 2
    chosen = [c for c in listed if not args.parts or {c.part, c.name} & set(args.parts)]
    return run(chosen, len(listed), args.simulate, args.again, (args.out or VERIFIED).resolve())


def check(claim: Claim, simulate: bool) -> int:
    """The child process: prints the finding as its last line."""
    try:
        verdict, detail = claim.check(simulate)
    except Exception as error:
        verdict, detail = REFUTED, f"{type(error).__name__}: {error}"
    print(json.dumps({"verdict": verdict, "detail": " ".join(detail.split())}), flush=True)
    return 0


def machine(simulate: bool) -> dict[str, str]:
    """The device and the software, by which an existing report is continued or replaced."""
    script = f"import hal; hal.use('npu', simulate={simulate}); import torch; print(torch.npu.get_device_name(0))"
    # In another process, because this one would keep device memory while the claims are checked.
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    name = done.stdout.strip().splitlines()[-1]
    return {
        "device": f"{name}{' simulated' if simulate else ''}",
        "sources": sources(),
        "torch": str(torch.__version__),
    }


def run(chosen: Sequence[Claim], total: int, simulate: bool, again: bool, out: Path) -> int:
    """Checks the claims, each in a process, and writes the report after each."""
    about = machine(simulate)
    path = out / f"npu-{re.sub(r'[^a-z0-9]+', '-', about['device'].lower()).strip('-')}.json"
    report = begin(path, about)
    for claim in chosen:
        settled = report["claims"].get(claim.name, {}).get("verdict") in (CONFIRMED, MEASURED)
        if settled and not again:
            print(f"{claim.name}: {report['claims'][claim.name]['verdict']} before", flush=True)
            continue
        started = time.monotonic()
        finding = child(claim, simulate)
        row = {"part": claim.part, "text": claim.text, **finding, "seconds": round(time.monotonic() - started, 1)}
        report["claims"][claim.name] = row
        save(path, report)
        print(f"{claim.name}: {row['verdict']}: {row['detail']}", flush=True)
    refuted = [name for name, row in report["claims"].items() if row["verdict"] == REFUTED]
    print(f"{len(report['claims'])} of {total} claims checked; refuted: {', '.join(refuted) or 'none'}\nwrote {path}")
    return 1 if refuted else 0


def child(claim: Claim, simulate: bool) -> dict[str, str]:
    """The finding of a process that checks one claim; one that ends in another way refutes it."""
    command = [
        sys.executable,
        "-m",
        "hal.bench.npu.npu_run",
        "--only",
        claim.name,
        *(["--simulate"] if simulate else []),
    ]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False
        )
        finding: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
        return finding
    except subprocess.TimeoutExpired:
        return {"verdict": REFUTED, "detail": f"not done after {SECONDS} s"}
    except (IndexError, ValueError):
        return {"verdict": REFUTED, "detail": f"its process ended with exit code {done.returncode} and no finding"}


def begin(path: Path, about: dict[str, str]) -> dict[str, Any]:
    """The existing report if it is of this device and these sources, else a new one."""
    try:
        existing: dict[str, Any] = json.loads(path.read_text())
        if all(existing["machine"][name] == about[name] for name in about):
            return existing
    except (OSError, ValueError, KeyError):
        pass
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return {"machine": {**about, "date": today, "commit": commit()}, "claims": {}}


def save(path: Path, report: dict[str, Any]) -> None:
    """Replaces both files, so that a killed process leaves complete ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, text in ((path, json.dumps(report, indent=1) + "\n"), (path.with_suffix(".md"), markdown(report))):
        part = target.with_name(f"{target.name}.part")
        part.write_text(text)
        os.replace(part, target)


def markdown(report: dict[str, Any]) -> str:
    """The report as a page: one line for each claim."""
    about = report["machine"]
    lines = [
        f"# {about['device']}",
        "",
        f"Written by `make npu` on {about['date']}: torch {about['torch']}, commit {about['commit']}.",
        "",
        "| claim | verdict | what was seen | s |",
        "|---|---|---|---|",
    ]
    for name, row in report["claims"].items():
        detail = row["detail"].replace("|", "\\|")
        lines.append(f"| {name}: {row['text']} | {row['verdict']} | {detail} | {row['seconds']:g} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
