"""The parts of `make gpu`, unit by unit. A unit is a name and a function that yields its rows.

Each part runs in a separate process (run.py), so neither its imports nor a crash affect other parts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import hal

from ..harness.case import OURS, Thunk
from . import cases as gpu_cases
from .cases import GpuCase
from .gpu_report import TRAIN, GpuRow

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, SECONDS = 7, 0.03
"""The number of timing rounds of a case, and the seconds per round."""
Unit = tuple[str, Callable[[], Iterable[GpuRow]]]


def alive() -> bool:
    """Whether the CUDA context still accepts work, which it does not after an illegal memory access."""
    try:
        torch.cuda.synchronize()
    except Exception:  # torch.AcceleratorError or RuntimeError, depending on torch's version
        return False
    return True


def parity() -> Iterator[Unit]:
    """The conformance kit on the device: every op with torch's deterministic backward kernels, then cuDNN's attention.

    cuDNN has no deterministic kernels and declines calls in that mode, so it is tested in a second pass without it. The
    kit's calls are so short that its results are still reproducible.
    """
    from hal.testing import golden, kit

    backend = hal.use("cuda", simulate=False, deterministic=True)
    impls = {name: [i for i in of_op if i.id != "cuda/cudnn"] for name, of_op in backend.impls.items()}
    for op in hal.OPS.values():
        yield f"{op.name} in a fixed order", partial(_kit_rows, backend, impls, partial(kit.check_op, backend, op))
    yield kit.GOLDEN, partial(_kit_rows, backend, impls, partial(golden.check_golden, backend))

    backend = hal.use("cuda", simulate=False, deterministic=False)
    impls = {name: [i for i in of_op if i.id == "cuda/cudnn"] for name, of_op in backend.impls.items()}
    op = hal.OPS["flash_attention"]
    yield f"{op.name}, cudnn", partial(_kit_rows, backend, impls, partial(kit.check_op, backend, op))


def _kit_rows(
    backend: hal.Backend, impls: dict[str, list[hal.Impl]], check: Callable[[], Iterable[Any]]
) -> Iterator[GpuRow]:
    """The rows of a check of the kit, with only these implementations registered."""
    from hal.testing.subject import only

    with only(backend, impls):
        for row in check():
            yield row.as_json()


def checks() -> Iterator[Unit]:
    """checks.py on the device."""
    from . import checks as gpu_checks

    for name, check in gpu_checks.checks(hal.use("cuda", simulate=False)):
        yield name, partial(_check_rows, name, check)


def _check_rows(name: str, check: Callable[[], str]) -> list[GpuRow]:
    from . import checks as gpu_checks

    return [{"name": name, "problem": gpu_checks.outcome(check)}]


def measured(group: str) -> Iterator[Unit]:
    """A group of cases: the function of cases.py with this name."""
    hal.use("cuda", simulate=False)
    for case in getattr(gpu_cases, group)():
        yield f"{case.name} {case.shape}", partial(_ratio_rows, case)
        # dynamo limits the number of compiled versions per function, and cases share functions.
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def _ratio_rows(case: GpuCase) -> Iterable[GpuRow]:
    return measure(case, copy_bandwidth() if case.bytes else 0.0)


def training() -> Iterator[Unit]:
    """Losses of the same run on cuda and on cpu_ref."""
    for backend in ("cuda", "cpu_ref"):
        yield backend, partial(_training_rows, backend)


def _training_rows(backend: str) -> Iterator[GpuRow]:
    with tempfile.TemporaryDirectory() as folder:
        text, run_dir = Path(folder) / "text.txt", Path(folder) / "run"
        text.write_text("".join(f"{i} squared is {i * i}. " for i in range(20000)))
        command = [sys.executable, "-m", "hal", "train", "--backend", backend, *TRAIN.split()]
        subprocess.run([*command, "--text-file", str(text), "--run-dir", str(run_dir)], check=True, cwd=ROOT)
        losses = json.loads((run_dir / "run.json").read_text())["losses"]
    yield {"backend": backend, "losses": [loss for _, loss in losses]}


UNITS: dict[str, Callable[[], Iterable[Unit]]] = {
    "parity": parity,
    "checks": checks,
    "kernels": partial(measured, "kernels"),
    "train_step": partial(measured, "train_step"),
    "attention": partial(measured, "attention"),
    "training": training,
}
"""Part -> its units. They are generated while the part runs, because creating a case allocates its tensors."""


def seconds_per_call(call: Thunk, count: int) -> float:
    """Mean over `count` calls queued one after the other, by the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / count


@cache
def copy_bandwidth() -> float:
    """Bytes read and written per second by a device copy of 1 GiB: the ceiling of memory-bound kernels."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds_per_call(lambda: target.copy_(source), 3)  # the warm-up
    return 2 * source.numel() / min(seconds_per_call(lambda: target.copy_(source), 10) for _ in range(5))


def measure(case: GpuCase, bandwidth: float) -> Iterable[GpuRow]:
    """Rows {name, shape, peer, ratio_median, ratio_min, ratio_max, ceiling, share_of_ceiling, seconds} of one case.

    A peer that cannot run gets a row with the reason as `absent`; if ours cannot run, this is the only row. Raises
    RuntimeError if a call breaks the CUDA context, after which nothing can run.
    """
    counts: dict[str, int] = {}  # calls per round
    absent: dict[str, str] = {}
    for name, call in case.calls.items():
        try:
            call()  # compiles
            call()
            torch.cuda.synchronize()
            counts[name] = max(1, round(SECONDS / max(seconds_per_call(call, 1), 1e-6)))
        except Exception as error:  # compilers and kernels raise exceptions of any class
            absent[name] = first_line(error)
            if not alive():
                raise RuntimeError(f"{name} broke the CUDA context: {absent[name]}") from error
    row = {"name": case.name, "shape": case.shape}
    if OURS in absent:
        yield {**row, "peer": OURS, "absent": absent[OURS]}
        return
    # Ours and the peers run alternately, so that changes of the clock rate have little effect on their ratio.
    rounds = [{name: seconds_per_call(case.calls[name], n) for name, n in counts.items()} for _ in range(ROUNDS)]
    ours = statistics.median(seconds[OURS] for seconds in rounds)
    share = case.bytes / ours / bandwidth if case.bytes else None
    for peer in [name for name in counts if name != OURS]:
        ratios = sorted(seconds[peer] / seconds[OURS] for seconds in rounds)
        yield {
            **row,
            "peer": peer,
            "ratio_median": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
            "seconds": ours,
            "ceiling": "device copy" if share is not None else "",
            "share_of_ceiling": share,
            "copy_bandwidth": bandwidth if share is not None else None,
        }
    for peer, reason in absent.items():
        yield {**row, "peer": peer, "absent": reason}


def first_line(error: Exception) -> str:
    """An exception's class and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
