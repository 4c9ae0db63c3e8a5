"""What HAL claims of Ascend devices, one check each: preflight, parity, production, layouts, training and timings.

A check returns a Finding: the claim is confirmed or refuted, or something was measured of which nothing is claimed.
Every check runs in a process of its own (npu_run.py), so that a failed device ends one claim only.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hal
from hal import ops

ROOT = Path(__file__).resolve().parents[2]
CONFIRMED, REFUTED, MEASURED = "confirmed", "refuted", "measured"
PARTS = ("preflight", "parity", "production", "layouts", "training", "timings")
LOSSES_AGREE = 1e-3
"""Largest difference of losses between a layout and one process, in float32, over LAYOUT_STEPS."""
TRAIN_TOLERANCE = 0.05
"""Largest difference of losses from cpu_ref's over 40 steps in bfloat16."""
LAYOUT_STEPS = 10


class Finding(NamedTuple):
    """What a check found: one of the verdicts, and what was seen."""

    verdict: str
    detail: str


@dataclass(frozen=True)
class Claim:
    """name: unique. text: what is claimed. check: called with whether the device is simulated."""

    part: str
    name: str
    text: str
    check: Callable[[bool], Finding]


def judged(right: bool, detail: str) -> Finding:
    """Confirmed or refuted."""
    return Finding(CONFIRMED if right else REFUTED, detail)


def use(simulate: bool, **options: Any) -> hal.Backend:
    """The npu backend, active."""
    return hal.use("npu", simulate=simulate, **options)


def _probe(simulate: bool) -> Finding:
    from hal.backends.npu import Npu

    probe = Npu(simulate=simulate).probe()
    facts = "; ".join(f"{name} {value}" for name, value in probe.facts.items())
    return judged(probe.ok, f"{probe.reason} ({facts})")


def _kernels(simulate: bool) -> Finding:
    from hal.backends.npu import kernels

    use(simulate)
    return judged(not kernels.missing(), kernels.missing() or "built and loaded")


def _collectives(simulate: bool) -> Finding:
    """All devices of the machine: values of an all_reduce, and its bandwidth."""
    from hal.backends.npu import Npu

    count = 2 if simulate else Npu(simulate=False).probe().count
    if count < 2:
        return Finding(MEASURED, "one device, so nothing to send")
    out = _launched(count, simulate, [str(Path(__file__).with_name("collective.py")), "12" if simulate else "28"])
    seen = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    return judged(
        seen["right"], f"{count} devices, all_reduce of {seen['bytes']:,} bytes: {seen['rate'] / 1e9:.3g} GB/s"
    )


def _launched(count: int, simulate: bool, command: list[str]) -> str:
    how = ["--backend", "npu", *(["--simulate"] if simulate else []), "--nproc-per-node", str(count), "--", *command]
    return _output([sys.executable, "-m", "hal", "launch", *how])


def _output(command: list[str]) -> str:
    """Raises HalError with the end of its messages if the command fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        end = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise hal.HalError(f"exit {done.returncode}: {' | '.join(end)}")
    return done.stdout


def _kit(op: str, scale: str, simulate: bool) -> Finding:
    from hal.testing import run

    report = run(use(simulate), ops=[op], scale=scale, examples=2 if simulate else 25)
    failed = [f"{r.dtype} {r.implementation}: {r.message}" for r in report.rows if r.status == "fail"]
    calls = sum(row.samples for row in report.rows)
    if report.rows and all(r.status == "declined" for r in report.rows):
        return Finding(MEASURED, f"no call is for this device: {'; '.join(report.rows[0].reasons)}")
    return judged(report.ok and calls > 0, "; ".join(failed) or f"{len(report.rows)} rows, {calls} calls")


def _losses(simulate: bool, backend: str, words: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        text, run_dir = Path(folder) / "text.txt", Path(folder) / "run"
        text.write_text("".join(f"{i} squared is {i * i}. " for i in range(20000)))
        command = [sys.executable, "-m", "hal", "train", "--backend", backend, *words.split()]
        command += ["--simulate"] if simulate and backend == "npu" else []
        _output([*command, "--text-file", str(text), "--run-dir", str(run_dir), "--sample-tokens", "0"])
        return [loss for _, loss in json.loads((run_dir / "run.json").read_text())["losses"]]


def _model(simulate: bool, steps: int) -> str:
    size = 32 if simulate else 512
    return (
        f"--num-layers 2 --hidden-size {size} --num-attention-heads 4 --seq-length {size}"
        f" --max-position-embeddings {size} --micro-batch-size 2 --global-batch-size 4 --train-iters {steps}"
        " --lr 1e-3 --swiglu --tokenizer-type ByteTokenizer --attention-dropout 0 --hidden-dropout 0.1"
    )


def _layout(words: str, simulate: bool) -> Finding:
    steps = 2 if simulate else LAYOUT_STEPS
    one, two = (_losses(simulate, "npu", f"{_model(simulate, steps)} {more}") for more in ("", words))
    apart = max(abs(a - b) for a, b in zip(one, two, strict=True))
    return judged(apart <= LOSSES_AGREE, f"losses differ by {apart:.2g} at most over {steps} steps")


def _training(simulate: bool) -> Finding:
    words = f"{_model(simulate, 3 if simulate else 40)} --bf16"
    device, reference = (_losses(simulate, backend, words) for backend in ("npu", "cpu_ref"))
    apart = max(abs(a - b) for a, b in zip(device, reference, strict=True))
    return judged(apart <= TRAIN_TOLERANCE, f"losses differ by {apart:.2g} at most; last {device[-1]:.4f}")


def seconds(call: Callable[[], object], calls: int) -> float:
    """Median over five rounds of the device's time per call."""
    npu: Any = torch.npu  # type: ignore[attr-defined]  # exists once torch_npu is loaded
    rounds: list[float] = []
    for _ in range(6):  # the first is the warm-up
        start, end = (npu.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(rounds[1:])


def _faster(ours: Callable[[], object], other: Callable[[], object], goal: float, simulate: bool, what: str) -> Finding:
    """Whether ours takes at most 1 / goal of the other's time. The simulator's time says nothing of a device's."""
    calls = 1 if simulate else 20
    mine, its = (seconds(call, calls) for call in (ours, other))
    detail = f"{its / mine:.3g} times the speed of {what} ({mine * 1e6:.3g} us against {its * 1e6:.3g} us)"
    return Finding(MEASURED, detail) if simulate else judged(its / mine >= goal, detail)


def _attention(simulate: bool) -> Finding:
    device = use(simulate).device()
    s = 64 if simulate else 4096
    q, k, v = (torch.randn(1, 8, s, 128, dtype=torch.bfloat16).to(device).requires_grad_() for _ in range(3))
    dy, triangle = torch.randn_like(q), torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(device)

    def ours() -> object:
        return torch.autograd.grad(ops.flash_attention(q, k, v, layout="BNSD", next_tokens=0), (q, k, v), dy)

    def vendor() -> object:
        out = torch.ops.npu.npu_fusion_attention(
            q, k, v, 8, "BNSD", atten_mask=triangle, scale=128**-0.5, sparse_mode=3
        )[0]
        return torch.autograd.grad(out, (q, k, v), dy)

    return _faster(ours, vendor, 0.95, simulate, f"npu_fusion_attention, forward and backward of 1 x 8 x {s} x 128")


def _dropout(simulate: bool) -> Finding:
    x = torch.randn(1 << (12 if simulate else 24), dtype=torch.bfloat16).to(use(simulate).device())
    rng = hal.Rng(1)
    name = "torch_npu's own dropout"
    return _faster(
        lambda: ops.dropout(x, 0.1, rng), lambda: torch.nn.functional.dropout(x, 0.1, True), 0.5, simulate, name
    )


def _adamw(simulate: bool) -> Finding:
    backend = use(simulate)
    size = 64 if simulate else 1 << 16

    def tensors() -> list[Tensor]:
        return [torch.rand(size).to(backend.device()) for _ in range(8 if simulate else 100)]

    given = {name: tensors() for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    calls = {impl.id: partial(impl.call, **given, step=5, lr=1e-4) for impl in backend.implementations(ops.adamw)}
    return _faster(calls["npu/adamw"], calls["npu/apply_adam_w"], 1.0, simulate, "npu_apply_adam_w for each tensor")


def _copy(simulate: bool) -> Finding:
    source = torch.empty(1 << (12 if simulate else 30), dtype=torch.uint8, device=use(simulate).device())
    target = torch.empty_like(source)
    rate = 2 * source.numel() / seconds(lambda: target.copy_(source), 1 if simulate else 10)
    return Finding(MEASURED, f"a copy reads and writes {rate / 1e9:.4g} GB/s")


def claims() -> list[Claim]:
    """All claims, in the order in which they are checked."""
    from hal.testing.production.cases import cases

    large = {case.op for case in cases()}
    found = [
        Claim("preflight", "probe", "driver, CANN and torch_npu fit together", _probe),
        Claim("preflight", "kernels", "CANN builds HAL's AscendC kernels", _kernels),
        Claim("preflight", "collectives", "HCCL connects the devices and adds correctly", _collectives),
    ]
    for op in hal.OPS:
        text = f"the kit passes for {op}"
        found.append(Claim("parity", f"parity {op}", text, partial(_kit, op, "default")))
        if op in large:
            check = partial(_kit, op, "production")
            found.append(Claim("production", f"production {op}", f"{text} at production sizes", check))
    layouts = {
        "tp2": "--nproc-per-node 2 --tensor-model-parallel-size 2",
        "pp2": "--nproc-per-node 2 --pipeline-model-parallel-size 2",
        "dp2": "--nproc-per-node 2",
    }
    for name, words in layouts.items():
        found.append(Claim("layouts", name, f"{name} trains as one process", partial(_layout, words)))
    return [
        *found,
        Claim("training", "training", "losses follow cpu_ref's", _training),
        Claim("timings", "copy", "the copy bandwidth", _copy),
        Claim("timings", "attention", "attention costs at most 5 % more than the vendor's operator", _attention),
        Claim("timings", "dropout", "dropout with HAL's bits takes at most twice the vendor's time", _dropout),
        Claim("timings", "adamw", "AdamW of 100 tensors is not slower than the vendor's operator", _adamw),
    ]


def environment() -> dict[str, str]:
    """The child processes' environment: torch_npu is loaded by HAL, not by torch."""
    return {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
