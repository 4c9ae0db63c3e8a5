"""The parts of `make gpu`: what each runs, unit by unit. A unit is a name and what makes its rows.

Each part runs in a process of its own (gpu.py), so what it imports and breaks is its own affair.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import hal

from .gpu_report import OURS, TRAIN, Row

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, SECONDS = 7, 0.03
NEEDS = {
    "parity": {"hypothesis": "hypothesis"},
    "checks": {"hypothesis": "hypothesis"},
    "training": {"megatron.core": "megatron-core==0.16.1", "cffi": "cffi"},
}
"""Part -> module -> what pip installs it from; what all parts need, the backend's probe names."""

Unit = tuple[str, Callable[[], Iterable[Row]]]


def lacking(part: str) -> str:
    """Which packages a part misses here, and how to install them; "" if none."""
    gone = [package for module, package in NEEDS.get(part, {}).items() if not _installed(module)]
    if not gone:
        return ""
    names = " and ".join(package.split("=")[0] for package in gone)
    return f"{names} {'is' if len(gone) == 1 else 'are'} not installed: pip install {' '.join(gone)}"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def alive() -> bool:
    """Whether the CUDA context still takes work; after an illegal memory access it never does again."""
    try:
        torch.cuda.synchronize()
    except Exception:  # torch.AcceleratorError or RuntimeError, by its version
        return False
    return True


def parity() -> Iterator[Unit]:
    """The conformance kit on the device, with the deterministic variants of torch's backward kernels.

    cuDNN has none and refuses then, so its turn comes afterwards: the kit's calls are short enough for it to repeat.
    """
    from hal.testing import golden, kit
    from hal.testing.subject import only

    def rows(backend: Any, impls: dict[str, list[hal.Impl]], make: Callable[[], Iterable[Any]]) -> Iterator[Row]:
        with only(backend, impls):
            for row in make():
                yield row.as_json()

    for deterministic in (True, False):
        backend = hal.use("cuda", simulate=False, deterministic=deterministic)
        mine = {
            name: [i for i in impls if (i.id == "cuda/cudnn") != deterministic] for name, impls in backend.impls.items()
        }
        for op in hal.OPS.values() if deterministic else [hal.OPS["flash_attention"]]:
            make = lambda backend=backend, op=op: kit.check_op(backend, op)  # noqa: E731
            name = f"{op.name}{' in a fixed order' if deterministic else ', cudnn'}"
            yield name, lambda b=backend, m=mine, k=make: rows(b, m, k)
        if deterministic:
            yield kit.GOLDEN, lambda b=backend, m=mine: rows(b, m, lambda: golden.check_golden(b))


def checks() -> Iterator[Unit]:
    """gpu_checks.py on the device."""
    from . import gpu_checks

    for name, check in gpu_checks.checks(hal.use("cuda", simulate=False)):
        yield name, lambda name=name, check=check: [{"name": name, "wrong": gpu_checks.outcome(check)}]


def measured(cases: str) -> Iterator[Unit]:
    """A group of cases of gpu_cases.py."""
    from . import gpu_cases

    hal.use("cuda", simulate=False)
    for case in getattr(gpu_cases, cases)():
        yield f"{case.name} {case.shape}", lambda case=case: measure(case, copy_bandwidth() if case.bytes else 0.0)
        # Compilers keep what they made by function, up to a small number, and cases share functions.
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def training() -> Iterator[Unit]:
    """Losses of the same run on cuda and on cpu_ref."""

    def rows(backend: str) -> Iterator[Row]:
        with tempfile.TemporaryDirectory() as folder:
            text, run_dir = Path(folder) / "text.txt", Path(folder) / "run"
            text.write_text("".join(f"{i} squared is {i * i}. " for i in range(20000)))
            command = [sys.executable, "-m", "hal.cli", "train", "--backend", backend, *TRAIN.split()]
            subprocess.run([*command, "--text-file", str(text), "--run-dir", str(run_dir)], check=True, cwd=ROOT)
            found = json.loads((run_dir / "run.json").read_text())["losses"]
        yield {"backend": backend, "losses": [loss for _, loss in found]}

    for backend in ("cuda", "cpu_ref"):
        yield backend, lambda backend=backend: rows(backend)


UNITS: dict[str, Callable[[], Iterable[Unit]]] = {
    "parity": parity,
    "checks": checks,
    "kernels": lambda: measured("kernels"),
    "train_step": lambda: measured("train_step"),
    "attention": lambda: measured("attention"),
    "training": training,
}


def seconds_per_call(call: Callable[[], object], count: int) -> float:
    """Of `count` calls queued one after the other, by the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


@cache
def copy_bandwidth() -> float:
    """Bytes per second of a device copy of 1 GiB, read and write counted; memory-bound kernels are held against it."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds_per_call(lambda: target.copy_(source), 3)
    return 2 * source.numel() / min(seconds_per_call(lambda: target.copy_(source), 10) for _ in range(5))


def measure(case: Any, bandwidth: float) -> Iterable[Row]:
    """Rows {name, shape, peer, ratio_median, ratio_min, ratio_max, ceiling, share_of_ceiling, seconds} of one case.

    A peer that cannot run is a row with the reason as `absent`; if ours cannot, that is the only row. Raises
    RuntimeError if one of them leaves a CUDA context with which nothing can run any more.
    """
    runnable, absent = {}, {}
    for name, call in case.calls.items():
        try:
            call()
            call()
            torch.cuda.synchronize()
            runnable[name] = (call, max(1, round(SECONDS / max(seconds_per_call(call, 1), 1e-6))))
        except Exception as error:  # compilers and kernels raise whatever they like
            absent[name] = first_line(error)
            if not alive():
                raise RuntimeError(f"{name} broke the CUDA context: {absent[name]}") from error
    if OURS in absent:
        yield {"name": case.name, "shape": case.shape, "peer": OURS, "absent": absent[OURS]}
        return
    rounds = [{n: seconds_per_call(c, k) for n, (c, k) in runnable.items()} for _ in range(ROUNDS)]
    mine = statistics.median(r[OURS] for r in rounds)
    share = case.bytes / mine / bandwidth if case.bytes else None
    for peer in runnable:
        if peer == OURS:
            continue
        ratios = sorted(r[peer] / r[OURS] for r in rounds)
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
            "copy_bandwidth": bandwidth if share is not None else None,
        }
    for peer, reason in absent.items():
        yield {"name": case.name, "shape": case.shape, "peer": peer, "absent": reason}


def first_line(error: Exception) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
