"""`make gpu`: everything that needs an NVIDIA GPU, into docs/verified/cuda-<device>.json and .md.

The parity table of the cuda backend, what the simulator lacks (gpu_checks.py), a training run whose losses must follow
cpu_ref's, and benchmark ratios (gpu_cases.py). The report is written after each of them: what ends a run early loses
nothing. Exit code 0 if all of it ran and holds, 1 if not, 2 without a GPU. Ratios are reported, not judged, except that
the report marks what misses its goal: 85 % of the measured copy bandwidth, and no kernel of torch's faster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import hal

VERIFIED = Path(__file__).resolve().parent.parent / "docs" / "verified"
ROUNDS, SECONDS = 7, 0.03
GOAL_OF_BANDWIDTH = 0.85
PARTS = ("parity", "device", "training", "benchmarks")
OURS = "ours"
TRAIN = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 8 --global-batch-size 8 --train-iters 40 --lr 1e-3 --bf16 --attention-dropout 0.1"
    " --hidden-dropout 0.1 --swiglu --tokenizer-type ByteTokenizer --sample-tokens 0"
)
TRAIN_TOLERANCE = 0.05
"""Largest difference of losses over 40 steps: roundings that differ grow slowly, a wrong kernel leaves this at once."""


def seconds_per_call(call: Callable[[], object], count: int) -> float:
    """Of `count` calls queued one after the other, by the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def copy_bandwidth() -> float:
    """Bytes per second of a device copy of 1 GiB, read and write counted; memory-bound kernels are held against it."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds_per_call(lambda: target.copy_(source), 3)
    return 2 * source.numel() / min(seconds_per_call(lambda: target.copy_(source), 10) for _ in range(5))


def measure(case: Any, bandwidth: float) -> Iterable[dict[str, Any]]:
    """Rows {name, shape, peer, ratio_median, ratio_min, ratio_max, ceiling, share_of_ceiling, seconds} of one case.

    A peer that cannot run is a row with the reason as `absent`; if ours cannot, that is the only row.
    """
    runnable, absent = {}, {}
    for name, call in case.calls.items():
        try:
            call()
            call()
            torch.cuda.synchronize()
            runnable[name] = (call, max(1, round(SECONDS / max(seconds_per_call(call, 1), 1e-6))))
        except Exception as error:  # compilers and kernels raise whatever they like
            absent[name] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if "ours" in absent:
        yield {"name": case.name, "shape": case.shape, "peer": OURS, "absent": absent["ours"]}
        return
    rounds = [{n: seconds_per_call(c, k) for n, (c, k) in runnable.items()} for _ in range(ROUNDS)]
    mine = statistics.median(r["ours"] for r in rounds)
    share = case.bytes / mine / bandwidth if case.bytes else None
    for peer in runnable:
        if peer == "ours":
            continue
        ratios = sorted(r[peer] / r["ours"] for r in rounds)
        yield {
            "name": case.name,
            "shape": case.shape,
            "peer": peer,
            "ratio_median": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
            "seconds": mine,
            "ceiling": "device copy" if share is not None else "",
            "share_of_ceiling": share,
        }
    for peer, reason in absent.items():
        yield {"name": case.name, "shape": case.shape, "peer": peer, "absent": reason}


def parity() -> list[dict[str, Any]]:
    """The conformance kit on the device, with the deterministic variants of torch's backward kernels.

    cuDNN has none and refuses then, so its turn comes afterwards: the kit's calls are short enough for it to repeat.
    """
    from hal import testing
    from hal.testing.subject import only

    def show(row: Any) -> None:
        print(row, flush=True)

    rows = []
    for deterministic in (True, False):
        backend = hal.use("cuda", simulate=False, deterministic=deterministic)
        mine = {
            name: [i for i in impls if (i.id == "cuda/cudnn") != deterministic] for name, impls in backend.impls.items()
        }
        with only(backend, mine):
            ops = None if deterministic else ["flash_attention"]
            rows += testing.run(backend, ops=ops, on_row=show).rows
    return [row.as_json() for row in rows]


def train() -> dict[str, Any]:
    """Losses of the same run on cuda and on cpu_ref, and their largest difference."""
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(f"{i} squared is {i * i}. " for i in range(20000)))
        for backend in ("cuda", "cpu_ref"):
            run_dir = Path(folder) / backend
            command = [sys.executable, "-m", "hal.cli", "train", "--backend", backend, *TRAIN.split()]
            subprocess.run([*command, "--text-file", str(text), "--run-dir", str(run_dir)], check=True)
            losses[backend] = [loss for _, loss in json.loads((run_dir / "run.json").read_text())["losses"]]
    worst = max(abs(a - b) for a, b in zip(losses["cuda"], losses["cpu_ref"]))
    return {"command": TRAIN, "losses": losses, "worst_difference": worst, "tolerance": TRAIN_TOLERANCE}


def missed(row: dict[str, Any]) -> str:
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


def attention_order(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The implementations of attention, fastest first, by the mean logarithm of their times over forward and backward.

    What MEASURED in backends/cuda/order.py should say of this device. Only those that ran every such case.
    """
    times: dict[str, list[float]] = {}
    for r in rows:
        if r["name"].startswith("attention causal") and r["peer"].startswith("cuda/") and "absent" not in r:
            times.setdefault(r["peer"], []).append(math.log(r["ratio_median"]))
    complete = max(map(len, times.values()), default=0)
    return sorted((i for i, t in times.items() if len(t) == complete), key=lambda i: statistics.fmean(times[i]))


def markdown(result: dict[str, Any]) -> str:
    """The report for people."""
    about = [f"- {name}: {value}" for name, value in result["machine"].items()]
    lines = [f"# cuda on {result['machine']['device']}", "", *about, ""]
    lines += [f"**{wrong}**" for wrong in failures(result)]
    lines += ["", "## Parity", ""]
    lines += ["| op | dtype | implementation | status | calls | worst (tolerances) |", "|---|---|---|---|---|---|"]
    for r in result.get("parity", ()):
        worst = r["worst_error_in_tolerances"]
        shown = worst if worst is None or isinstance(worst, str) else f"{worst:.3g}"
        lines.append(f"| {r['op']} | {r['dtype']} | {r['implementation']} | {r['status']} | {r['samples']} | {shown} |")
    lines += ["", "## What the simulator lacks", ""]
    lines += [f"- {name}: {found or 'holds'}" for name, found in result.get("device", {}).items()]
    lines += ["", "## Ratios (above 1: ours is faster)", ""]
    lines += [
        "| what | shape | peer | ratio | min..max | ours | of copy bandwidth | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in result.get("benchmarks", ()):
        if "absent" in r:
            lines.append(f"| {r['name']} | {r['shape']} | {r['peer']} | cannot run: {r['absent']} | | | | |")
            continue
        share = "" if r["share_of_ceiling"] is None else f"{r['share_of_ceiling']:.0%}"
        lines.append(
            f"| {r['name']} | {r['shape']} | {r['peer']} | {r['ratio_median']:.2f} | "
            f"{r['ratio_min']:.2f}..{r['ratio_max']:.2f} | {r['seconds'] * 1e6:.1f} us | {share} | {missed(r)} |"
        )
    order = ", ".join(attention_order(result.get("benchmarks", ()))) or "nothing ran"
    lines += ["", f"Attention, fastest first (for `MEASURED` in `backends/cuda/order.py`): {order}."]
    lines += ["", "## Training", ""]
    if "training" in result:
        t = result["training"]
        lines += [f"`hal train {t['command']}`, cuda against cpu_ref: losses differ by at most "]
        lines[-1] += f"{t['worst_difference']:.4f} over {len(t['losses']['cuda'])} steps (allowed {t['tolerance']})."
    return "\n".join(lines) + "\n"


def failures(result: dict[str, Any]) -> list[str]:
    """What did not run, or did not hold."""
    found = [f"{part} did not run: {error}" for part, error in result.get("errors", {}).items()]
    found += [f"{part} has not run" for part in PARTS if part not in result and part not in result.get("errors", {})]
    for r in result.get("parity", ()):
        if r["status"] == "fail":
            found.append(f"{r['op']} {r['dtype']} {r['implementation']} fails: {r.get('message', '')}")
    found += [f"{name}: {wrong}" for name, wrong in result.get("device", {}).items() if wrong]
    for r in result.get("benchmarks", ()):
        if r["peer"] == OURS:
            found.append(f"{r['name']} {r['shape']} did not run: {r['absent']}")
    if "training" in result and not result["training"]["worst_difference"] <= TRAIN_TOLERANCE:
        found.append("the losses of training part from cpu_ref's")
    return found


def benchmarks(result: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows, which are in `result` as soon as there are some; adds the copy bandwidth to its machine."""
    from . import gpu_cases

    hal.use("cuda", simulate=False)
    bandwidth = copy_bandwidth()
    result["machine"]["copy bandwidth (GB/s)"] = round(bandwidth / 1e9)
    rows: list[dict[str, Any]] = result.setdefault("benchmarks", [])
    for cases in (gpu_cases.kernels, gpu_cases.attention, gpu_cases.train_step):
        for case in cases():
            for row in measure(case, bandwidth):
                rows.append(row)
                print(row, flush=True)
            # Compilers keep what they made by function, up to a small number, and cases share functions.
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        write(result)
    return rows


def checks() -> dict[str, str]:
    """gpu_checks.py on the device."""
    from . import gpu_checks

    return gpu_checks.run(hal.use("cuda", simulate=False))


def write(result: dict[str, Any]) -> None:
    """Writes the report as it stands."""
    VERIFIED.mkdir(parents=True, exist_ok=True)
    target = VERIFIED / f"cuda-{re.sub(r'[^a-z0-9]+', '-', result['machine']['device'].lower()).strip('-')}"
    target.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    target.with_suffix(".md").write_text(markdown(result))
    print(f"wrote {target}.json and {target}.md", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything; exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m hal.bench.gpu", description=__doc__)
    parser.parse_args(argv)
    try:
        hal.use("cuda", simulate=False)
    except hal.HalError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    about = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
    }
    result: dict[str, Any] = {"machine": about, "errors": {}}
    makers = {"parity": parity, "device": checks, "training": train, "benchmarks": lambda: benchmarks(result)}
    for part in PARTS:
        try:
            result[part] = makers[part]()
        except Exception as error:
            traceback.print_exc()
            result["errors"][part] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        about["seconds taken"] = round(time.monotonic() - began)
        write(result)
    wrong = failures(result)
    print("\n".join(wrong) or "everything holds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
