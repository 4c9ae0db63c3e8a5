"""The conformance kit for collectives: a backend's Comm against the definitions on lists of tensors.

Every rank generates all ranks' inputs from a seed, so each checks its own result without communicating. Sums of floats
may differ by the rounding of any order of summation; everything else must be equal bit for bit. Also checked: dtype and
shape of the result, that inputs are neither written nor aliased, that int64 is exact beyond 2**53, and that several
collectives can be in progress at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hal
from hal.comm.contract import REDUCE_OPS, Comm, Message, run_reference

from .parity_rows import Report, Row
from .processes import run_processes
from .sharded_processes import check_sharded_ops

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class Case:
    """One collective call on all ranks."""

    collective: str
    dtype: torch.dtype
    op: str
    source: int
    shape: tuple[int, ...]
    strided: bool
    seed: int

    def input(self, rank: int) -> Tensor:
        """The input of rank `rank`; non-contiguous if `strided`."""
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        shape = (*self.shape[:-1], self.shape[-1] * 2) if self.strided and self.shape else self.shape
        if self.dtype.is_floating_point:
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        elif self.dtype == torch.int64:
            x = torch.randint(-(2**60), 2**60, shape, generator=generator)  # inexact if sent as int32 or float64
        else:
            x = torch.randint(0, 2 if self.dtype == torch.bool else 31, shape, generator=generator).to(self.dtype)
        return x[..., ::2] if self.strided and self.shape else x


def cases(size: int, per_kind: int, seed: int = 0) -> Iterator[Case]:
    """`per_kind` cases of every (collective, dtype, reduction) for a group of `size`."""
    draw = random.Random(seed)
    kinds = [("all_reduce", op) for op in REDUCE_OPS] + [("reduce_scatter", op) for op in REDUCE_OPS]
    kinds += [("all_gather", ""), ("all_to_all", ""), ("broadcast", "")]
    for collective, op in kinds:
        for dtype in DTYPES:
            if op == "avg" and dtype == torch.bool:
                continue
            for i in range(per_kind):
                shape = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
                if collective in ("reduce_scatter", "all_to_all"):
                    shape[0] = size * draw.randint(1, 4)
                if i == 1:
                    shape[-1] = 0 if len(shape) > 1 else shape[-1]
                if i == 2 and collective in ("all_reduce", "broadcast"):
                    shape = []
                strided = draw.random() < 0.4
                yield Case(
                    collective, dtype, op or "sum", draw.randrange(size), tuple(shape), strided, draw.getrandbits(31)
                )


def error_in_tolerances(case: Case, result: Tensor, size: int, rank: int) -> float:
    """Largest |result - reference| in units of the allowed rounding error; 0 = equal, inf = wrong dtype or shape."""
    inputs = [case.input(r) for r in range(size)]
    options = {"op": case.op, "source": case.source}
    expected = run_reference(inputs, case.collective, **options)[rank]
    got = result.detach().cpu()
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return float("inf")
    sums = case.collective in ("all_reduce", "reduce_scatter") and case.op in ("sum", "avg")
    if not (sums and case.dtype.is_floating_point) or not expected.numel():
        return 0.0 if torch.equal(got, expected) else float("inf")
    # Any order of summation of `size` terms rounds at most `size` times, each time by eps of the sum of magnitudes.
    exact = run_reference([x.double() for x in inputs], case.collective, **options)[rank]
    magnitude = run_reference([x.double().abs() for x in inputs], case.collective, **options)[rank]
    allowed = magnitude * size * torch.finfo(case.dtype).eps + torch.finfo(case.dtype).tiny
    return float(((got.double() - exact).abs() / allowed).max())


def check_comm(comm: Comm, device: torch.device, per_kind: int = 4) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Runs all cases on this rank; (collective, reduction, dtype) -> {samples, worst, reasons, problems}."""
    results: dict[tuple[str, str, str], dict[str, Any]] = {}
    for case in cases(comm.size, per_kind):
        reduces = case.collective in ("all_reduce", "reduce_scatter")
        key = (case.collective, case.op if reduces else "", str(case.dtype).removeprefix("torch."))
        row = results.setdefault(key, {"samples": 0, "worst": 0.0, "reasons": [], "problems": []})
        x = case.input(comm.rank).to(device)
        reasons = list(comm.why_not(case.collective, x, case.op if reduces else None))
        if reasons:
            row["reasons"] = reasons
            continue
        before = x.clone()
        result = comm.start(case.collective, x, op=case.op, source=case.source).wait()
        worst = error_in_tolerances(case, result, comm.size, comm.rank)
        row["samples"] += 1
        row["worst"] = max(row["worst"], worst)
        if worst > 1:
            row["problems"].append(f"{case}: off by {worst:g} tolerances")
        result.zero_()
        if not torch.equal(x.cpu(), before.cpu()):
            row["problems"].append(f"{case}: the input was mutated, or the result aliases it")
    for name, check in (("asynchronous", _check_async), ("exchange", _check_exchange)):
        problems = check(comm, device)
        results[name, "", "float32"] = {"samples": 1, "worst": 0.0, "reasons": [], "problems": problems}
    comm.barrier()
    return results


def _check_async(comm: Comm, device: torch.device) -> list[str]:
    """Three all_reduces and an all_gather in progress at once, waited for in reverse order."""
    inputs = [torch.arange(4.0, device=device) + 10 * i + comm.rank for i in range(3)]
    pending = [comm.start("all_reduce", x, op="max") for x in inputs]
    gathered = comm.start("all_gather", inputs[0])
    problems = []
    for i, p in reversed(list(enumerate(pending))):
        expected = torch.arange(4.0) + 10 * i + comm.size - 1
        if not torch.equal(p.wait().cpu(), expected):
            problems.append(f"collective {i} of 3 that were in progress at once: {p.wait()} instead of {expected}")
    if not torch.equal(gathered.wait().cpu(), torch.cat([torch.arange(4.0) + r for r in range(comm.size)])):
        problems.append(f"all_gather started after three all_reduces: {gathered.wait()}")
    return problems


def _check_exchange(comm: Comm, device: torch.device) -> list[str]:
    """Two batches of one message to every other rank, in progress at once; the second is waited for first."""
    others = [r for r in range(comm.size) if r != comm.rank]

    def message(source: int, to: int, i: int) -> Tensor:
        return torch.full((i + 2, 3), float(source * 100 + to * 10 + i))

    sends = [Message(r, message(comm.rank, r, i).to(device)) for i in range(2) for r in others]
    receives = [Message(r, message(r, comm.rank, i).to(device).zero_()) for i in range(2) for r in others]
    first = comm.exchange_start(sends[: len(others)], receives[: len(others)])
    second = comm.exchange(sends[len(others) :], receives[len(others) :])
    results = first() + second
    expected = [message(r, comm.rank, i) for i in range(2) for r in others]
    return [
        f"message {i}: {got.cpu()} instead of {e}"
        for i, (got, e) in enumerate(zip(results, expected))
        if not torch.equal(got.cpu(), e)
    ]


def _on_rank(backend: str, options: Mapping[str, Any], per_kind: int) -> Any:
    active = hal.use(backend, **options)
    comm = active.comm(timeout=60.0)
    if not isinstance(comm, Comm):
        raise hal.PluginError(f"comm() of backend '{backend}' returned {comm!r}; it must return a hal.Comm")
    device = _own_device(active, comm)
    results = {**check_comm(comm, device, per_kind), **check_sharded_ops(comm, device)}
    return results, dict(comm.emulations), active.simulated


def _own_device(active: hal.Backend, comm: Comm) -> torch.device:
    return active.device(active.local_index())


def parity_collectives(
    backend: str,
    options: Mapping[str, Any] | None = None,
    *,
    nproc: int = 4,
    per_kind: int = 4,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Report:
    """The report of `hal parity --collectives`: one row per collective, reduction and dtype, over `nproc` processes,
    and one per implementation and dtype of the products with their communication (sharded_processes.py).

    Ops are named "all_reduce[sum]", "all_gather", "all_gather_linear[composition]", ...; what the transport emulates is
    listed among the reasons.
    """
    per_rank = run_processes(nproc, _on_rank, backend, dict(options or {}), per_kind, timeout=600.0)
    (first_rank, emulations, simulated), report = per_rank[0], Report(backend, per_rank[0][2])
    for (collective, op, dtype), first in first_rank.items():
        each = [results[collective, op, dtype] for results, _, _ in per_rank]
        problems = [f"rank {r}: {p}" for r, row in enumerate(each) for p in row["problems"]]
        emulated = [f"emulated: {why}" for name, why in emulations.items() if name in (collective, op)]
        row = Row(
            op=f"{collective}[{op}]" if op else collective,
            dtype=dtype,
            backend=backend,
            simulated=simulated,
            status="fail" if problems else "pass" if first["samples"] else "declined",
            samples=sum(row["samples"] for row in each),
            worst_error_in_tolerances=max(row["worst"] for row in each) if first["samples"] else None,
            reasons=[*first["reasons"], *emulated],
            implementation=f"{nproc} processes",
            message="; ".join(problems[:3]),
            code=f"hal parity --backend {backend} --collectives --nproc {nproc}" if problems else "",
        )
        report.rows.append(row)
        on_row(row)
    return report
