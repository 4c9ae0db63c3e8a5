"""The report of `make gpu`: what it contains, which failures follow from it, and its page.

The run consists of parts (parts.py), a part of units, a unit of rows.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any, TypedDict

from ..harness.case import OURS

PARTS = ("parity", "checks", "kernels", "large", "train_step", "attention", "training", "multi")
MEASURED = ("kernels", "large", "train_step", "attention")
"""The parts whose rows are ratios."""
RUNNING, COMPLETE, STOPPED, NOT_RUN = "running", "complete", "stopped", "not run"
"""The states of a part: its process is running (or was killed together with its parent); all units have finished; its
process ended between two units; a package is missing."""
GOAL_OF_BANDWIDTH = 0.85
SMALL = ", small"
"""At the end of the shape of cases that fit into the L2 cache, whose time is mostly that of a launch."""
TRAIN_TOLERANCE = 0.05
"""Largest allowed difference of losses over 40 steps. Rounding differences grow slowly and stay below it."""

GpuRow = dict[str, Any]
"""One result. Its keys depend on the part; {"error": TEXT} replaces the remaining results of a failed unit."""


class UnitRecord(TypedDict):
    """done: whether the unit has finished, possibly with an exception. sources, commit, date: of the run that did."""

    done: bool
    rows: list[GpuRow]
    sources: str
    commit: str
    date: str


class PartRecord(TypedDict):
    """why: the reason for the states STOPPED and NOT_RUN. current: the unit that its process is in, or ""."""

    units: dict[str, UnitRecord]
    seconds: float
    state: str
    why: str
    current: str


class Report(TypedDict):
    machine: dict[str, Any]
    parts: dict[str, PartRecord]


def rows(report: Report, part: str) -> list[GpuRow]:
    """The rows that a part has produced so far."""
    if part not in report["parts"]:
        return []
    return [row for unit in report["parts"][part]["units"].values() for row in unit["rows"]]


def other_commits(report: Report) -> list[str]:
    """By part and commit, how many of its units ran with other sources than those of the last run."""
    counts: dict[tuple[str, str, str], int] = {}
    for part, record in report["parts"].items():
        for unit in record["units"].values():
            if unit["sources"] != report["machine"]["sources"]:
                key = part, unit["commit"], unit["date"]
                counts[key] = counts.get(key, 0) + 1
    return [
        f"{part}: {count} of {len(report['parts'][part]['units'])} units with the sources of {commit} ({date})"
        for (part, commit, date), count in counts.items()
    ]


def missed(row: GpuRow) -> str:
    """The goals that a row misses; "" if none."""
    if "absent" in row:
        return ""
    misses = []
    share = row["share_of_ceiling"]
    if share is not None and share < GOAL_OF_BANDWIDTH and SMALL not in row["shape"]:
        misses.append(f"{share:.0%} of copy bandwidth, goal {GOAL_OF_BANDWIDTH:.0%}")
    if row["name"].startswith("attention") and row["ratio_median"] < 0.98:  # 2 % slower is within the noise
        misses.append("is faster")
    return "; ".join(misses)


def attention_order(rows: Sequence[GpuRow]) -> dict[str, list[str]]:
    """By class of call, the implementations of attention, fastest first, by the mean logarithm of their forward and
    backward times.

    This is the entry for this device under "measured" of backends/cuda/attention_order.json. Only implementations that
    ran every case of a class are included.
    """
    orders = {}
    for kind, name in (("square", "attention causal"), ("window", "attention window")):
        times: dict[str, list[float]] = {}
        for r in rows:
            if "peer" in r and "absent" not in r and r["name"].startswith(name) and r["peer"].startswith("cuda/"):
                # All ratios of a case have the same divisor, so their logarithms order like those of the times.
                times.setdefault(r["peer"], []).append(math.log(r["ratio_median"]))
        complete = max(map(len, times.values()), default=0)
        fastest_first = sorted(times, key=lambda i: statistics.fmean(times[i]))
        if times:
            orders[kind] = [i for i in fastest_first if len(times[i]) == complete]
    return orders


def losses(report: Report) -> tuple[dict[str, list[float]], float | None]:
    """The training run's losses by backend, and their largest difference (None before both backends have run)."""
    curves = {r["backend"]: r["losses"] for r in rows(report, "training") if "losses" in r}
    if set(curves) != {"cuda", "cpu_ref"}:
        return curves, None
    return curves, _apart(curves["cuda"], curves["cpu_ref"])


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b))


def layouts(report: Report) -> dict[str, float]:
    """The largest difference of the losses of every layout from those of one process, as far as they have run."""
    curves = {r["layout"]: r["losses"] for r in rows(report, "multi") if "layout" in r}
    one = curves.pop("one process", None)
    return {} if one is None else {layout: _apart(one, curve) for layout, curve in curves.items()}


def _part_failures(report: Report, part: str) -> list[str]:
    """The reasons why a part is incomplete, and its failed units."""
    record = report["parts"].get(part)
    if record is None:
        return [f"{part} has not run"]
    failures = {
        NOT_RUN: [f"{part} did not run: {record['why']}"],
        STOPPED: [f"{part} stopped: {record['why']}"],
        RUNNING: [f"{part} has not finished (run it again: it continues where it was)"],
        COMPLETE: [],
    }[record["state"]]
    for name, unit in record["units"].items():
        failures += [f"{part}, {name}: {row['error']}" for row in unit["rows"] if "error" in row]
    return failures


def failures(report: Report, parts: Sequence[str] = PARTS) -> list[str]:
    """The failures of `parts`, including units that did not run."""
    texts = [text for part in PARTS if part in parts for text in _part_failures(report, part)]
    for part in {"parity", "multi"}.intersection(parts):
        for r in rows(report, part):
            if r.get("status") == "fail":
                texts.append(f"{r['op']} {r['dtype']} {r['implementation']} fails: {r.get('message', '')}")
    if "checks" in parts:
        texts += [f"{r['name']}: {r['problem']}" for r in rows(report, "checks") if r.get("problem")]
    for part in MEASURED:
        if part in parts:
            absent = [r for r in rows(report, part) if r.get("peer") == OURS]  # see parts.measure
            texts += [f"{r['name']} {r['shape']} did not run: {r['absent']}" for r in absent]
            wrong = {
                f"{r['name']} {r['shape']}": r["error_in_tolerances"]
                for r in rows(report, part)
                if not error_of(r) <= 1.0
            }
            texts += [f"{case}: an error of {error} tolerances at the measured size" for case, error in wrong.items()]
    worst = losses(report)[1]
    if "training" in parts and worst is not None and not worst <= TRAIN_TOLERANCE:  # NaN fails
        texts.append("the losses of training differ from cpu_ref's")
    if "multi" in parts:
        far = {layout: apart for layout, apart in layouts(report).items() if not apart <= TRAIN_TOLERANCE}
        texts += [f"the losses of {layout} differ from those of one process by {far[layout]:.3g}" for layout in far]
    return texts


def error_of(row: GpuRow) -> float:
    """The error of a comparison's values in tolerances; 0 if the row has none."""
    return float(row.get("error_in_tolerances", 0.0))


def markdown(report: Report) -> str:
    """The report as a page."""
    about = [f"- {name}: {value}" for name, value in report["machine"].items()]
    if report["machine"].get("simulated"):
        about.append("- **a rehearsal on the simulator, at reduced sizes: the times say nothing**")
    seconds = {part: record["seconds"] for part, record in report["parts"].items() if record.get("seconds")}
    about += [f"- seconds taken: {', '.join(f'{part} {s:.0f}' for part, s in seconds.items()) or 'none yet'}"]
    about += [f"- {text}" for text in other_commits(report)]
    lines = [f"# cuda on {report['machine']['device']}", "", *about, ""]
    lines += [f"**{failure}**\n" for failure in failures(report)]
    lines += [*_parity(report), *_checks(report), *_ratios(report), *_training(report), *_multi(report)]
    return "\n".join(lines) + "\n"


def _parity(report: Report) -> list[str]:
    return ["## Parity", "", *_kit_table(rows(report, "parity"))]


def _kit_table(rows: Sequence[GpuRow]) -> list[str]:
    lines = ["| op | dtype | implementation | status | calls | worst (tolerances) |", "|---|---|---|---|---|---|"]
    for r in rows:
        if "op" not in r:
            continue
        worst = r["worst_error_in_tolerances"]
        shown = worst if worst is None or isinstance(worst, str) else f"{worst:.3g}"
        lines.append(f"| {r['op']} | {r['dtype']} | {r['implementation']} | {r['status']} | {r['samples']} | {shown} |")
    return lines


def _checks(report: Report) -> list[str]:
    lines = ["", "## What the simulator lacks", ""]
    for r in rows(report, "checks"):
        if "name" in r:
            lines.append(f"- {r['name']}: {r['problem'] or 'passes' if 'problem' in r else 'not run: ' + r['absent']}")
    return lines


def _ratios(report: Report) -> list[str]:
    lines = ["", "## Ratios (above 1: ours is faster)", ""]
    lines += [
        "| what | shape | peer | ratio | min..max | ours | of copy bandwidth | TFLOP/s | error (tolerances) | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    measured = [r for part in MEASURED for r in rows(report, part) if "peer" in r]
    for r in measured:
        if "absent" in r:
            lines.append(f"| {r['name']} | {r['shape']} | {r['peer']} | cannot run: {r['absent']} | | | | | | |")
            continue
        share = "" if r["share_of_ceiling"] is None else f"{r['share_of_ceiling']:.0%}"
        rate = "" if r["flops_per_second"] is None else f"{r['flops_per_second'] / 1e12:.1f}"
        lines.append(
            f"| {r['name']} | {r['shape']} | {r['peer']} | {r['ratio_median']:.2f} | "
            f"{r['ratio_min']:.2f}..{r['ratio_max']:.2f} | {r['seconds'] * 1e6:.1f} us | {share} | {rate} | "
            f"{error_of(r):.2g} | {missed(r)} |"
        )
    copies = sorted({round(r["copy_bandwidth"] / 1e9) for r in measured if r.get("copy_bandwidth")})
    if copies:
        lines += ["", f"Copy bandwidth, measured: {' and '.join(map(str, copies))} GB/s."]
    orders = attention_order(measured)
    entry = json.dumps({report["machine"]["device"]: orders})[1:-1] if orders else "nothing ran"
    where = '"measured" in `backends/cuda/attention_order.json`, which is not part of the digest'
    return [*lines, "", f"Attention, fastest first by class of call (for {where}): `{entry}`."]


def _training(report: Report) -> list[str]:
    curves, worst = losses(report)
    if worst is None:
        return ["", "## Training", ""]
    options = next(r["options"] for r in rows(report, "training") if "losses" in r)
    text = f"`hal train {options}`, cuda against cpu_ref: losses differ by at most "
    text += f"{worst:.4f} over {len(curves['cuda'])} steps (allowed {TRAIN_TOLERANCE})."
    return ["", "## Training", "", text]


def _multi(report: Report) -> list[str]:
    if "multi" not in report["parts"]:
        return []
    lines = ["", "## Several GPUs", "", *_kit_table(rows(report, "multi")), ""]
    for layout, apart in layouts(report).items():
        lines.append(f"- {layout}: losses differ from one process by at most {apart:.4f} (allowed {TRAIN_TOLERANCE})")
    for r in rows(report, "multi"):
        if "seconds_without" in r:
            ratio = r["seconds_without"] / r["seconds"]
            lines.append(f"- {r['name']}: {r['seconds'] * 1e3:.1f} ms per step, {ratio:.2f} times as fast as without")
    return lines
