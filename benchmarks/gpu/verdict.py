"""The one-page verdict of `make gpu`: the claims of the docs about the cuda backend, and what rows say about each.

CLAIMS lists the sentences (a test compares them with the pages). A claim is judged from a report alone: it holds, it is
refuted, or it is open, because its rows are missing or because it is about another device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from hal.backends.cuda.order import orders

from .checks import FLOAT32_SUMS, LATE, NO_READS, NO_SCORES, RECORDED
from .gpu_report import (
    GOAL_OF_BANDWIDTH,
    MEASURED,
    SMALL,
    TRAIN_TOLERANCE,
    GpuRow,
    Report,
    attention_order,
    error_of,
    layouts,
    losses,
    other_commits,
    rows,
)
from .kernel_cases import BEYOND

HOLDS, REFUTED, OPEN = "holds", "**refuted**", "open"


@dataclass(frozen=True)
class Judgement:
    """verdict: HOLDS, REFUTED or OPEN; evidence: the rows, or what is missing."""

    verdict: str
    evidence: str


@dataclass(frozen=True)
class Claim:
    """A sentence (or part of one) of a page below docs/, and how a report decides it."""

    page: str
    text: str
    judge: Callable[[Report], Judgement]


def _decided(holds: bool, evidence: str) -> Judgement:
    return Judgement(HOLDS if holds else REFUTED, evidence)


def _open(why: str) -> Judgement:
    return Judgement(OPEN, why)


def _parity(report: Report, op: str = "", implementation: str = "") -> Judgement:
    """That no row of the kit fails, of one op or implementation or of all."""
    found = [
        r
        for r in rows(report, "parity")
        if "op" in r and op in ("", r["op"]) and implementation in ("", r["implementation"]) and r["samples"]
    ]
    failed = [f"{r['op']} {r['dtype']} {r['implementation']}" for r in found if r["status"] == "fail"]
    if not found:
        return _open("the part parity has no such row")
    return _decided(not failed, "; ".join(failed[:3]) or f"{len(found)} rows of parity pass")


def _check(report: Report, name: str) -> Judgement:
    """That a check passes, or all checks whose names begin so."""
    found = [r for r in rows(report, "checks") if r.get("name", "").startswith(name)]
    ran = [r for r in found if "problem" in r]
    if not ran:
        return _open(found[0]["absent"] if found else f"the part checks has no row `{name}`")
    problems = [f"{r['name']}: {r['problem']}" for r in ran if r["problem"]]
    return _decided(not problems, "; ".join(problems[:3]) or f"{len(ran)} of the checks `{name}` pass")


def _compared(report: Report) -> Iterator[GpuRow]:
    """The rows with a measured comparison; none of a rehearsal, whose times say nothing."""
    if not report["machine"].get("simulated"):
        yield from (r for part in MEASURED for r in rows(report, part) if "ratio_median" in r)


def _bandwidth(report: Report) -> Judgement:
    shares = {
        f"{r['name']} {r['shape']}": r["share_of_ceiling"]
        for r in _compared(report)
        if r["share_of_ceiling"] and SMALL not in r["shape"]
    }
    if not shares:
        return _open("no kernel has been timed")
    slow = {case: share for case, share in shares.items() if share < GOAL_OF_BANDWIDTH}
    worst = ", ".join(f"{case} {slow[case]:.0%}" for case in sorted(slow, key=lambda case: slow[case])[:3])
    met = f"{len(shares) - len(slow)} of {len(shares)} cases reach {GOAL_OF_BANDWIDTH:.0%}"
    return _decided(not slow, f"{met}; slowest: {worst}" if slow else met)


def _values(report: Report, note: str = "") -> Judgement:
    errors = {
        f"{r['name']} {r['shape']}": error_of(r)
        for part in MEASURED
        for r in rows(report, part)
        if "error_in_tolerances" in r and note in r["shape"]
    }
    if not errors:
        return _open("no case with values has run")
    worst = max(errors, key=lambda case: errors[case])
    return _decided(
        errors[worst] <= 1.0, f"{len(errors)} cases, the largest error is {errors[worst]:.2g} tolerances ({worst})"
    )


def _rate(report: Report, device: str, low: float, high: float) -> Judgement:
    """The rate of attention with dropout in TFLOP/s on devices of this name, forward."""
    if device not in report["machine"]["device"]:
        return _open(f"about another device than {report['machine']['device']}")
    found = [r for r in _compared(report) if r["name"] == "attention with dropout fwd"]
    if not found:
        return _open("attention with dropout has not been timed")
    rate = statistics.median(r["flops_per_second"] for r in found) / 1e12
    return _decided(
        low <= rate <= high, f"{rate:.0f} TFLOP/s (median of {len(found)} rows `attention with dropout fwd`)"
    )


def _backward_of_dropout(report: Report) -> Judgement:
    seconds: dict[tuple[str, str], float] = {(r["name"], r["shape"]): r["seconds"] for r in _compared(report)}
    name = "attention with dropout"
    ratios = [
        (seconds[f"{name} fwd+bwd", shape] - forward) / forward
        for (case, shape), forward in seconds.items()
        if case == f"{name} fwd" and (f"{name} fwd+bwd", shape) in seconds
    ]
    if not ratios:
        return _open("attention with dropout has not been timed")
    ratio = statistics.median(ratios)
    return _decided(2.5 <= ratio <= 4.5, f"{ratio:.1f} times (median of {len(ratios)} sizes)")


def _fastest(report: Report) -> Judgement:
    """That no kernel of torch is more than 2 % faster than the one that HAL chooses."""
    found = [r for r in _compared(report) if r["name"].startswith("attention causal")]
    if not found:
        return _open("attention has not been timed")
    faster = [f"{r['peer']} {r['shape']}: {1 / r['ratio_median']:.2f}" for r in found if r["ratio_median"] < 0.98]
    return _decided(not faster, "; ".join(faster[:3]) or f"no peer is faster in {len(found)} rows")


def _order(report: Report) -> Judgement:
    """That the implementation that is tried first for squares and windows is the fastest one."""
    measured = attention_order(list(_compared(report)))
    if not measured:
        return _open("attention has not been timed")
    first = orders(report["machine"]["device"], report["machine"]["architecture"])
    wrong = [
        f"{kind}: {first[kind][0]} is tried first, {ids[0]} is the fastest"
        for kind, ids in measured.items()
        if first[kind][0] != ids[0]
    ]
    return _decided(not wrong, "; ".join(wrong) or f"for {' and '.join(measured)}")


def _training(report: Report) -> Judgement:
    worst = losses(report)[1]
    if worst is None:
        return _open("the part training has not finished")
    return _decided(worst <= TRAIN_TOLERANCE, f"the losses differ by at most {worst:.4f}")


def _layouts(report: Report) -> Judgement:
    apart = layouts(report)
    if not apart:
        return _open("the part multi needs two GPUs, and has not run")
    worst = max(apart, key=lambda layout: apart[layout])
    return _decided(apart[worst] <= TRAIN_TOLERANCE, f"{len(apart)} layouts; {worst} differs by {apart[worst]:.4f}")


CLAIMS = (
    Claim("verified/README.md", "Every implementation passes the conformance kit on the device.", _parity),
    Claim(
        "verified/README.md",
        "Values are those of the references in float64 at the measured sizes",
        _values,
    ),
    Claim("verified/README.md", "beyond 2^31 elements", partial(_values, note=BEYOND)),
    Claim("verified/README.md", "the losses of a training run are those of `cpu_ref`", _training),
    Claim(
        "verified/README.md",
        "Kernels reach 85 % of a copy's bandwidth, forward and backward, on tensors larger than the L2 cache.",
        _bandwidth,
    ),
    Claim(
        "verified/README.md",
        "No kernel of torch is faster at causal attention than the one that HAL chooses.",
        _fastest,
    ),
    Claim(
        "adr/0051-attention-of-our-own.md", "`attention_order.json` has the orders: estimates per architecture", _order
    ),
    Claim(
        "adr/0051-attention-of-our-own.md",
        "Attention with dropout or document masks stores no scores on sm_80 and later",
        partial(_check, name=NO_SCORES),
    ),
    Claim(
        "adr/0051-attention-of-our-own.md",
        "results that repeat bit for bit",
        partial(_parity, op="flash_attention", implementation="cuda/fused"),
    ),
    Claim(
        "adr/0051-attention-of-our-own.md",
        "HAL's dropout bits are the same on every backend",
        partial(_parity, op="philox_uniform"),
    ),
    Claim(
        "cuda-kernels.md",
        "140 to 210 TFLOP/s with dropout on an H100",
        partial(_rate, device="H100", low=140, high=210),
    ),
    Claim("cuda-kernels.md", "90 to 140 on an A100", partial(_rate, device="A100", low=90, high=140)),
    Claim("cuda-kernels.md", "it takes about three and a half times as long as forward", _backward_of_dropout),
    Claim("cuda-launches.md", "A step of `hal train` does not wait for the device.", partial(_check, name=NO_READS)),
    Claim("cuda-launches.md", "gives the losses of a plain one", partial(_check, name=RECORDED)),
    Claim("cuda-launches.md", "updates nothing if it is not finite", partial(_parity, op="adamw")),
    Claim("cuda-simulator.md", "on a GPU cuBLAS adds them", partial(_check, name=FLOAT32_SUMS)),
    Claim(
        "adr/0006-cuda-kernels-on-a-cpu.md",
        "a CUDA graph can hold the launch",
        partial(_check, name="graph of"),
    ),
    Claim(
        "verified/README.md",
        "a stream waits for the work before it, and later work for the stream",
        partial(_check, name=LATE),
    ),
    Claim(
        "parallel.md", "Losses, gradient norms, skipped steps and dropout are the same as with one process", _layouts
    ),
)


def page(report: Report) -> str:
    """The verdict as a page."""
    judged = [(claim, claim.judge(report)) for claim in CLAIMS]
    counts = [f"{sum(j.verdict == kind for _, j in judged)} {kind.strip('*')}" for kind in (HOLDS, REFUTED, OPEN)]
    machine = report["machine"]
    lines = [f"# Claims about cuda on {machine['device']}", ""]
    lines += [f"Of {len(judged)} claims of the docs: {', '.join(counts)}. ({machine.get('date', '')})", ""]
    if others := other_commits(report):
        lines += [f"Some rows are of other sources than {machine['commit']}. " + "; ".join(others) + ".", ""]
    if machine.get("simulated"):
        lines += ["A rehearsal on the simulator: nothing here is about a GPU.", ""]
    lines += ["| claim | page | verdict | evidence |", "|---|---|---|---|"]
    for claim, judgement in judged:
        evidence = judgement.evidence.replace("|", "\\|")
        lines.append(f"| {claim.text} | {claim.page} | {judgement.verdict} | {evidence} |")
    return "\n".join(lines) + "\n"
