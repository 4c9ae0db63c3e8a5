"""The parts of `make gpu`, unit by unit. A unit is a name and a function that yields its rows.

Each part runs in a separate process (run.py), so neither its imports nor a crash affect other parts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hal

from ..harness.case import OURS, Thunk
from . import cases, kernel_cases
from .cases import GpuCase
from .gpu_report import GpuRow
from .rehearsal import Gpu

ROOT = Path(__file__).resolve().parents[2]
Unit = tuple[str, Callable[[], Iterable[GpuRow]]]
RANKS = 2
"""Processes of the part "multi", each with a GPU."""


def parity(gpu: Gpu) -> Iterator[Unit]:
    """The conformance kit on the device: every op with torch's deterministic backward kernels, then cuDNN's attention.

    cuDNN has no deterministic kernels and declines calls in that mode, so it is tested in a second pass without it. The
    kit's calls are so short that its results are still reproducible.
    """
    from hal.testing import golden, kit

    effort = kit.Effort(**gpu.effort())
    backend = gpu.use(deterministic=True)
    impls = {name: [i for i in of_op if i.id != "cuda/cudnn"] for name, of_op in backend.impls.items()}
    for op in hal.OPS.values():
        yield (
            f"{op.name} in a fixed order",
            partial(_kit_rows, backend, impls, partial(kit.check_op, backend, op, effort)),
        )
    yield kit.GOLDEN, partial(_kit_rows, backend, impls, partial(golden.check_golden, backend))

    backend = gpu.use(deterministic=False)
    impls = {name: [i for i in of_op if i.id == "cuda/cudnn"] for name, of_op in backend.impls.items()}
    op = hal.OPS["flash_attention"]
    yield f"{op.name}, cudnn", partial(_kit_rows, backend, impls, partial(kit.check_op, backend, op, effort))


def _kit_rows(
    backend: hal.Backend, impls: dict[str, list[hal.Impl]], check: Callable[[], Iterable[Any]]
) -> Iterator[GpuRow]:
    """The rows of a check of the kit, with only these implementations registered."""
    from hal.testing.subject import only

    with only(backend, impls):
        for row in check():
            yield row.as_json()


def checks(gpu: Gpu) -> Iterator[Unit]:
    """checks.py on the device."""
    from . import checks as gpu_checks

    for check in gpu_checks.checks(gpu.use()):
        yield check.name, partial(_check_rows, check, gpu.lacks.get(check.needs, ""))


def _check_rows(check: Any, absent: str) -> list[GpuRow]:
    from . import checks as gpu_checks

    if absent:
        return [{"name": check.name, "absent": absent}]
    return [{"name": check.name, **gpu_checks.outcome(check.run)}]


CASES = {
    "kernels": kernel_cases.kernels,
    "large": kernel_cases.large,
    "train_step": kernel_cases.train_step,
    "attention": cases.attention,
}


def measured(part: str, gpu: Gpu) -> Iterator[Unit]:
    """The comparisons of a part."""
    gpu.use()
    for case in CASES[part](gpu):
        yield f"{case.name} {case.shape}", partial(measure, case, gpu)
        gpu.between_cases()


def training(gpu: Gpu) -> Iterator[Unit]:
    """Losses of the same run on cuda and on cpu_ref."""
    for backend in ("cuda", "cpu_ref"):
        yield backend, partial(_training_rows, {"backend": backend}, gpu, backend, ())


def _training_rows(row: GpuRow, gpu: Gpu, backend: str, options: Sequence[str]) -> Iterator[GpuRow]:
    simulate = ["--simulate"] if gpu.simulated and backend == "cuda" else []
    with tempfile.TemporaryDirectory() as folder:
        text, run_dir = Path(folder) / "text.txt", Path(folder) / "run"
        text.write_text("".join(f"{i} squared is {i * i}. " for i in range(20000)))
        command = [sys.executable, "-m", "hal", "train", "--backend", backend, *simulate, *gpu.train.split(), *options]
        subprocess.run([*command, "--text-file", str(text), "--run-dir", str(run_dir)], check=True, cwd=ROOT)
        losses = json.loads((run_dir / "run.json").read_text())["losses"]
    yield {**row, "options": gpu.train, "losses": [loss for _, loss in losses]}


ONE = "one process"
LAYOUTS = {
    ONE: "",
    "tensor parallel": "--tensor-model-parallel-size 2",
    "sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--pipeline-model-parallel-size 2",
    "data parallel": "",
    "data parallel, overlapped": "--overlap-grad-reduce",
    "distributed optimizer": "--use-distributed-optimizer",
    "ZeRO 3": "--zero-stage 3",
    "context parallel": "--context-parallel-size 2",
}
"""Runs of the part "multi": options of `hal train`. All but the first have RANKS processes."""


def multi(gpu: Gpu) -> Iterator[Unit]:
    """Several GPUs: collectives against their definitions, layouts against one process, overlapped reductions."""
    yield "collectives", partial(_collective_rows, gpu)
    for layout, options in LAYOUTS.items():
        ranks = [] if layout == ONE else ["--nproc-per-node", str(RANKS)]
        row = {"layout": layout}
        yield f"layout: {layout}", partial(_training_rows, row, gpu, "cuda", (*ranks, *options.split()))
    yield "overlap of gradient reduction", partial(_overlap_rows, gpu)


def _collective_rows(gpu: Gpu) -> Iterator[GpuRow]:
    from hal.testing.collectives import parity_collectives

    report = parity_collectives("cuda", {"simulate": gpu.simulated}, nproc=RANKS, per_kind=1 if gpu.simulated else 4)
    for row in report.rows:
        yield row.as_json()


def _overlap_rows(gpu: Gpu) -> Iterator[GpuRow]:
    """Seconds per step with and without --overlap-grad-reduce, of a model whose reduction takes a visible share."""
    layers, hidden, length = (2, 32, 16) if gpu.simulated else (12, 1024, 1024)
    sizes = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 4 --seq-length {length}"
    sizes += f" --max-position-embeddings {length} --micro-batch-size 2 --global-batch-size 4 --train-iters 1000 --bf16"
    seconds = {}
    for name, option in (("with", ["--overlap-grad-reduce"]), ("without", [])):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.json"
            command = [sys.executable, "-m", "hal", "launch", "--nproc-per-node", str(RANKS)]
            command += ["-m", "hal.bench.parallel.layout_run", "--backend", "cuda", *sizes.split(), *option]
            command += ["--simulate"] if gpu.simulated else []
            steps = {"HAL_BENCH_OUTPUT": str(path), "HAL_BENCH_STEPS": "2" if gpu.simulated else "20"}
            subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **steps})
            seconds[name] = json.loads(path.read_text())["seconds_per_step"]["median"]
    yield {"name": "overlap of gradient reduction", "seconds": seconds["with"], "seconds_without": seconds["without"]}


UNITS: dict[str, Callable[[Gpu], Iterable[Unit]]] = {
    "parity": parity,
    "checks": checks,
    **{part: partial(measured, part) for part in CASES},
    "training": training,
    "multi": multi,
}
"""Part -> its units. They are generated while the part runs, because creating a case allocates its tensors."""

REPLAYED = 20
"""Calls in a graph that is replayed to time small calls."""


def measure(case: GpuCase, gpu: Gpu) -> Iterable[GpuRow]:
    """Rows {name, shape, peer, ratio_median, ratio_min, ratio_max, ceiling, share_of_ceiling, seconds, timed,
    flops_per_second, error_in_tolerances} of one case; the last is the largest error of our values at this size.

    A peer that cannot run gets a row with the reason as `absent`; if ours cannot run, this is the only row. Raises
    RuntimeError if a call breaks the CUDA context, after which nothing can run.
    """
    row: GpuRow = {"name": case.name, "shape": case.shape}
    absent: dict[str, str] = {}
    _try(gpu, OURS, lambda: row.update(error_in_tolerances=_as_json(case.check())), absent)
    single = {} if absent else _first_calls(case.calls, gpu, absent)
    if OURS in absent:
        yield {**row, "peer": OURS, "absent": absent[OURS]}
        return
    calls, replayed = {name: case.calls[name] for name in single}, 1
    if single[OURS] < gpu.small:
        calls, replayed = _replays(calls, gpu, absent), REPLAYED
    counts = {name: max(1, round(gpu.seconds / max(single[name] * replayed, 1e-6))) for name in calls}
    # Ours and the peers run alternately, so that changes of the clock rate have little effect on their ratio.
    rounds = [
        {name: gpu.seconds_per_call(calls[name], n) / replayed for name, n in counts.items()} for _ in range(gpu.rounds)
    ]
    ours = statistics.median(seconds[OURS] for seconds in rounds)
    bandwidth = gpu.copy_bandwidth if case.bytes else None
    row |= {
        "seconds": ours,
        "timed": "calls" if replayed == 1 else f"a graph of {replayed} calls",
        "flops_per_second": case.flops / ours if case.flops else None,
        "ceiling": "device copy" if bandwidth else "",
        "share_of_ceiling": case.bytes / ours / bandwidth if bandwidth else None,
        "copy_bandwidth": bandwidth,
    }
    for peer in [name for name in counts if name != OURS]:
        ratios = sorted(seconds[peer] / seconds[OURS] for seconds in rounds)
        spread = {"ratio_median": statistics.median(ratios), "ratio_min": ratios[0], "ratio_max": ratios[-1]}
        yield {**row, "peer": peer, **spread}
    for peer, reason in absent.items():
        yield {**row, "peer": peer, "absent": reason}


def _as_json(error: float) -> float | str:
    """JSON has no number for infinity."""
    return error if error < float("inf") else "inf"


def _try(gpu: Gpu, name: str, call: Thunk, absent: dict[str, str]) -> bool:
    """Whether the call succeeds; otherwise its reason is added to `absent`. Raises if it broke the context."""
    try:
        call()
        gpu.synchronize()
    except Exception as error:  # compilers and kernels raise exceptions of any class
        absent[name] = first_line(error)
        if not gpu.alive():
            raise RuntimeError(f"{name} broke the CUDA context: {absent[name]}") from error
        return False
    return True


def _first_calls(calls: dict[str, Thunk], gpu: Gpu, absent: dict[str, str]) -> dict[str, float]:
    """The seconds of a call of each that can run, after a call that compiles and another one."""
    single: dict[str, float] = {}

    def first(name: str, call: Thunk) -> None:
        call()
        call()
        gpu.synchronize()
        single[name] = gpu.seconds_per_call(call, 1)

    for name, call in calls.items():
        _try(gpu, name, partial(first, name, call), absent)
    return single


def _replays(calls: dict[str, Thunk], gpu: Gpu, absent: dict[str, str]) -> dict[str, Thunk]:
    """For each call that can be captured, the replay of a graph of REPLAYED of them."""
    replays: dict[str, Thunk] = {}

    def several(call: Thunk) -> None:
        for _ in range(REPLAYED):
            call()  # its result is dropped, so that the graph's memory is that of one call

    def capture(name: str, call: Thunk) -> None:
        replays[name] = hal.backend().capture(partial(several, call))

    for name, call in calls.items():
        _try(gpu, name, partial(capture, name, call), absent)
    if OURS in absent:
        raise RuntimeError(f"ours cannot be captured in a graph: {absent[OURS]}")
    return replays


def first_line(error: Exception) -> str:
    """An exception's class and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
