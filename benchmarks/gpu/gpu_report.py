"""The report of `make gpu`, docs/verified/cuda-<device>.json and .md: what it holds, and what it says of it.

A part (gpu_parts.py) is made of units, a unit of rows. The file is replaced by rename at every row, so whoever is
killed leaves a whole one, and the part's next run goes on after the last unit that had come to its end.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = ("parity", "checks", "kernels", "train_step", "attention", "training")
MEASURED = ("kernels", "train_step", "attention")
"""The parts whose rows are ratios."""
RUNNING, WHOLE, STOPPED, NOT_RUN = "running", "whole", "stopped", "not run"
"""A part's states: its process runs (or was killed together with its parent); all units came to their end; its process
ended between two units; a package is missing."""
GOAL_OF_BANDWIDTH = 0.85
OURS = "ours"
TRAIN = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 8 --global-batch-size 8 --train-iters 40 --lr 1e-3 --bf16 --attention-dropout 0.1"
    " --hidden-dropout 0.1 --swiglu --tokenizer-type ByteTokenizer --sample-tokens 0"
)
TRAIN_TOLERANCE = 0.05
"""Largest difference of losses over 40 steps: roundings that differ grow slowly, a wrong kernel leaves this at once."""

Report = dict[str, Any]
Row = dict[str, Any]


def path_of(folder: Path, device: str) -> Path:
    """The .json of a device's report."""
    return folder / f"cuda-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def load(path: Path) -> Report:
    """The report; raises OSError or ValueError if there is none that can be read."""
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def begin(path: Path, machine: dict[str, Any]) -> str:
    """Makes the file, or keeps one that is about the same device and sources; returns which of them, in words."""
    kept: Report = {"parts": {}}
    said = f"a new report, {path}"
    if path.exists():
        try:
            found = load(path)
            if all(found["machine"].get(k) == machine[k] for k in ("device", "sources", "torch", "CUDA")):
                kept, said = found, f"{path} is extended"
            else:
                said += " (the one that was there is about other sources, or another torch)"
        except (ValueError, KeyError, AttributeError):
            said += " (the file that was there held none)"
    save(path, {"machine": machine, "parts": kept["parts"]})
    return said


def save(path: Path, report: Report) -> None:
    """Writes the .json and the .md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, text in ((path, json.dumps(report, indent=1) + "\n"), (path.with_suffix(".md"), markdown(report))):
        part = target.with_name(f"{target.name}.part{os.getpid()}")
        part.write_text(text)
        os.replace(part, target)


def rows(report: Report, part: str) -> list[Row]:
    """A part's rows, as far as they are known."""
    units = report["parts"].get(part, {}).get("units", {})
    return [row for unit in units.values() for row in unit["rows"]]


def missed(row: Row) -> str:
    """What goal a row misses; "" if none."""
    if "absent" in row:
        return ""
    found = []
    share = row["share_of_ceiling"]
    if share is not None and share < GOAL_OF_BANDWIDTH:
        found.append(f"{share:.0%} of copy bandwidth, goal {GOAL_OF_BANDWIDTH:.0%}")
    if row["name"].startswith("attention") and row["ratio_median"] < 0.98:
        found.append("is faster")
    return "; ".join(found)


def attention_order(rows: Sequence[Row]) -> list[str]:
    """The implementations of attention, fastest first, by the mean logarithm of their times over forward and backward.

    What MEASURED in backends/cuda/order.py should say of this device. Only those that ran every such case.
    """
    times: dict[str, list[float]] = {}
    for r in rows:
        if "peer" not in r or "absent" in r:
            continue
        if r["name"].startswith("attention causal") and r["peer"].startswith("cuda/"):
            times.setdefault(r["peer"], []).append(math.log(r["ratio_median"]))
    complete = max(map(len, times.values()), default=0)
    return sorted((i for i, t in times.items() if len(t) == complete), key=lambda i: statistics.fmean(times[i]))


def losses(report: Report) -> tuple[dict[str, list[float]], float | None]:
    """Of the training run, by backend; and their largest difference, None before both are there."""
    found = {r["backend"]: r["losses"] for r in rows(report, "training") if "losses" in r}
    if set(found) != {"cuda", "cpu_ref"}:
        return found, None
    return found, max(abs(a - b) for a, b in zip(found["cuda"], found["cpu_ref"]))


def _of_part(report: Report, part: str) -> list[str]:
    """Why a part is not whole, and which of its units broke."""
    entry = report["parts"].get(part)
    if entry is None:
        return [f"{part} has not run"]
    found = [f"{part}, {unit}: {r['error']}" for unit, u in entry["units"].items() for r in u["rows"] if "error" in r]
    if entry["state"] == NOT_RUN:
        found.insert(0, f"{part} did not run: {entry['why']}")
    elif entry["state"] == STOPPED:
        found.insert(0, f"{part} stopped: {entry['why']}")
    elif entry["state"] == RUNNING:
        found.insert(0, f"{part} has not come to its end (run it again: it goes on where it was)")
    return found


def failures(report: Report, parts: Sequence[str] = PARTS) -> list[str]:
    """What of `parts` did not run, or did not hold."""
    found = [wrong for part in PARTS if part in parts for wrong in _of_part(report, part)]
    if "parity" in parts:
        for r in rows(report, "parity"):
            if r.get("status") == "fail":
                found.append(f"{r['op']} {r['dtype']} {r['implementation']} fails: {r.get('message', '')}")
    if "checks" in parts:
        found += [f"{r['name']}: {r['wrong']}" for r in rows(report, "checks") if r.get("wrong")]
    for part in MEASURED:
        if part in parts:
            absent = [r for r in rows(report, part) if r.get("peer") == OURS]
            found += [f"{r['name']} {r['shape']} did not run: {r['absent']}" for r in absent]
    worst = losses(report)[1]
    if "training" in parts and worst is not None and not worst <= TRAIN_TOLERANCE:
        found.append("the losses of training part from cpu_ref's")
    return found


def markdown(report: Report) -> str:
    """The report for people."""
    about = [f"- {name}: {value}" for name, value in report["machine"].items()]
    seconds = {part: entry["seconds"] for part, entry in report["parts"].items() if entry.get("seconds")}
    about += [f"- seconds taken: {', '.join(f'{part} {s:.0f}' for part, s in seconds.items()) or 'none yet'}"]
    lines = [f"# cuda on {report['machine']['device']}", "", *about, ""]
    lines += [f"**{wrong}**\n" for wrong in failures(report)]
    lines += [*_parity(report), *_checks(report), *_ratios(report), *_training(report)]
    return "\n".join(lines) + "\n"


def _parity(report: Report) -> list[str]:
    lines = ["## Parity", ""]
    lines += ["| op | dtype | implementation | status | calls | worst (tolerances) |", "|---|---|---|---|---|---|"]
    for r in rows(report, "parity"):
        if "op" not in r:
            continue
        worst = r["worst_error_in_tolerances"]
        shown = worst if worst is None or isinstance(worst, str) else f"{worst:.3g}"
        lines.append(f"| {r['op']} | {r['dtype']} | {r['implementation']} | {r['status']} | {r['samples']} | {shown} |")
    return lines


def _checks(report: Report) -> list[str]:
    found = [r for r in rows(report, "checks") if "wrong" in r]
    return ["", "## What the simulator lacks", "", *(f"- {r['name']}: {r['wrong'] or 'holds'}" for r in found)]


def _ratios(report: Report) -> list[str]:
    lines = ["", "## Ratios (above 1: ours is faster)", ""]
    lines += [
        "| what | shape | peer | ratio | min..max | ours | of copy bandwidth | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    measured = [r for part in MEASURED for r in rows(report, part) if "peer" in r]
    for r in measured:
        if "absent" in r:
            lines.append(f"| {r['name']} | {r['shape']} | {r['peer']} | cannot run: {r['absent']} | | | | |")
            continue
        share = "" if r["share_of_ceiling"] is None else f"{r['share_of_ceiling']:.0%}"
        lines.append(
            f"| {r['name']} | {r['shape']} | {r['peer']} | {r['ratio_median']:.2f} | "
            f"{r['ratio_min']:.2f}..{r['ratio_max']:.2f} | {r['seconds'] * 1e6:.1f} us | {share} | {missed(r)} |"
        )
    copies = sorted({round(r["copy_bandwidth"] / 1e9) for r in measured if r.get("copy_bandwidth")})
    if copies:
        lines += ["", f"Copy bandwidth, measured: {' and '.join(map(str, copies))} GB/s."]
    order = ", ".join(attention_order(measured)) or "nothing ran"
    return [*lines, "", f"Attention, fastest first (for `MEASURED` in `backends/cuda/order.py`): {order}."]


def _training(report: Report) -> list[str]:
    found, worst = losses(report)
    if worst is None:
        return ["", "## Training", ""]
    said = f"`hal train {TRAIN}`, cuda against cpu_ref: losses differ by at most "
    said += f"{worst:.4f} over {len(found['cuda'])} steps (allowed {TRAIN_TOLERANCE})."
    return ["", "## Training", "", said]
