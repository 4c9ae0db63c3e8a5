"""The production tier: mandatory calls at the sizes of models, compared block by block with the float64 reference.

The default tier compares small calls completely, so an error that begins at some size passes it: a kernel that never
reads beyond channel 512, 32-bit row offsets, partial sums that are rounded between tiles. Here every implementation
runs the calls of `cases.py`; the reference is evaluated for parts of each (`blocks.py`).
"""

from __future__ import annotations

import ctypes
import gc
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.core.backend import Backend, Impl
from hal.core.dispatch import activated
from hal.core.op import DtypeSpec, Op, Sample, TensorSpec
from hal.errors import UnsupportedOp

from ..calls import Outcome, backward, bind, not_stored, run, tensors
from ..parity_rows import NO_IMPLEMENTATION, Row, shortened
from ..reference import Reference
from ..subject import Subject
from .block_comparison import Judge, Wrong
from .blocks import RUN, Block
from .cases import Case, cases
from .early_reads import EarlyReads

_PERIOD = (1 << 22) - 3
"""Elements after which generated values repeat: odd, so that a wrapped offset does not meet equal values."""


def check_production(
    backend: Backend,
    ops: Sequence[Op[Any, Any]],
    *,
    seed: int = 0,
    dtypes: Collection[torch.dtype] | None = None,
    reduced: bool | None = None,
    on_call: Callable[[str, int], None] = lambda row, calls: None,
) -> Iterator[Row]:
    """One row per implementation and dtype of the ops; dtypes: those to run, default all of each op's tolerances.

    reduced: small forms of the calls, for simulators; default: if the backend is simulated. on_call: as of
    `hal.testing.run`. A call for which memory is missing, or which every implementation refuses although some run other
    calls in its dtype, has status "not run".
    """
    small = backend.simulated if reduced is None else reduced
    for op in ops:
        chosen = [case for case in cases() if case.op == op.name and (case.reduced is not None or not small)]
        impls = backend.implementations(op)
        for dtype in op.tol if dtypes is None else [dtype for dtype in op.tol if dtype in dtypes]:
            of_dtype = [case for case in chosen if dtype in case.in_dtypes()]
            if not impls and of_dtype:
                yield _row(backend, op, dtype, None, "declined", [NO_IMPLEMENTATION])
                continue
            refused: list[dict[str, str]] = []
            ran = False
            for impl in impls if of_dtype else ():
                row, refusals = _check_dtype(Subject(backend, impl, dtype), of_dtype, small, seed, on_call)
                ran |= row.samples > 0
                refused.append(refusals)
                yield row
            nowhere = [name for name in (refused[0] if refused else ()) if all(name in r for r in refused)]
            known = {case.name for case in of_dtype if case.name in nowhere and _stated(backend, case)}
            for status, names in (("declined", known), ("not run", set(nowhere) - known)):
                if ran and names:
                    reasons = [f"{n}: refused by every implementation ({refused[0][n]})" for n in nowhere if n in names]
                    yield _row(backend, op, dtype, None, status, reasons)


def _stated(backend: Backend, case: Case) -> bool:
    """Whether the backend's capabilities say that it does not make this call."""
    return case.sample.kwargs.get("dropout_p", 0.0) > 0.0 and not backend.capabilities().attention_dropout


def _row(
    backend: Backend, op: Op[Any, Any], dtype: torch.dtype, impl: Impl | None, status: str, reasons: list[str]
) -> Row:
    name = str(dtype).removeprefix("torch.")
    return Row(op.name, name, backend.name, backend.simulated, status, 0, None, reasons, impl.id if impl else None)


def _check_dtype(
    subject: Subject, chosen: Sequence[Case], small: bool, seed: int, on_call: Callable[[str, int], None]
) -> tuple[Row, dict[str, str]]:
    """The row of an implementation in one dtype, and the reasons of the calls that it refused, by case."""
    backend, op = subject.backend, subject.op
    row = _row(backend, op, subject.dtype, subject.impl, "pass", [])
    failures: list[str] = []
    declined: dict[str, str] = {}
    not_run: list[str] = []
    with subject:
        for case in chosen:
            on_call(str(subject), row.samples)
            sample = case.reduced if small else case.sample
            assert sample is not None
            call = _Call(subject, case, sample, seed)
            try:
                reasons = call.check()
                if reasons:
                    declined[case.name] = "; ".join(reasons)
                row.samples += not reasons
            except _NoMemory as missing:
                not_run.append(f"{case.name}: {missing}")
            except Wrong as wrong:
                failures.append(f"{case.name}: {wrong}")
                subject.worst = max(subject.worst, wrong.tolerances)
            finally:
                subject.worst = max(subject.worst, call.judge.worst)
                _release_memory()
    row.worst_error_in_tolerances = subject.worst if row.samples or failures else None
    row.reasons = not_run + shortened(list(declined.values()))
    if failures:
        row.status, row.message = "fail", "\n    ".join(failures)
        simulate = " --simulate" if backend.simulated else ""
        row.code = f"hal parity --backend {backend.name}{simulate} --op {op.name} --scale production --seed {seed}"
    elif not_run:
        row.status = "not run"
    elif not row.samples:
        row.status = "declined"
    elif subject.waiver != 1.0:
        row.status = "waived"
        row.reasons.insert(0, f"waiver x{subject.waiver:g}: {subject.waiver_reason}")
    return row, declined


class _NoMemory(Exception):
    """A call needs more memory than there is, in words."""


class _Call:
    """One case on one implementation in one dtype."""

    def __init__(self, subject: Subject, case: Case, sample: Sample, seed: int) -> None:
        self.subject, self.case, self.sample = subject, case, sample
        self.random = random.Random(f"{seed} {case.op} {case.name}")
        self.judge = Judge(subject.op, subject.dtype, subject.tol, subject.waiver)
        self.with_grad = bool(subject.op.grads) and sample.grad

    def check(self) -> tuple[str, ...]:
        """Runs and compares the call; the reasons if the implementation declines it. Raises Wrong and _NoMemory."""
        subject, op = self.subject, self.subject.op
        if not_storable := not_stored(self.sample, subject.stored):
            return not_storable
        shapes = self._require_memory()
        arguments = bind(op, *_build(self.sample, subject.dtype, subject.device))
        self.case.plant(arguments)
        call = op.Call(**arguments)
        op.check(call)
        try:
            reasons = subject.impl.refusals(call)
        except Exception as error:
            raise Wrong(f"why_not raised {type(error).__name__}: {error}") from error
        if reasons:
            return reasons
        blocks = list(self.case.blocks(arguments, self.random))
        # A call that writes in place is compared with what the reference makes of copies taken before.
        judge = self.judge
        expected = [judge.expected(block, [], False) for block in blocks] if op.mutates else []
        calls, dys = subject.calls, []
        try:
            # The results are read as a model reads them: without synchronising the device, and outputs before anything
            # else is done, which would give late work time to finish.
            outcome = run(op, op, arguments, self.with_grad)
            early = EarlyReads(blocks if _described(outcome.outputs) == shapes else (), outcome)
            if self.with_grad:
                dys = [_fill(TensorSpec(tuple(y.shape)), y.dtype, subject.device, 99) for y in outcome.differentiable]
                outcome.gradients = backward(outcome, dys)
                early.read_gradients(blocks, outcome)
            subject.backend.synchronize()
        except UnsupportedOp as error:
            if subject.impl.composed:  # one of the ops that it calls is refused
                return (str(error).splitlines()[0],)
            raise Wrong(f"accepted the call and raised UnsupportedOp: {error}") from error
        except Exception as error:
            raise Wrong(f"accepted the call and raised {type(error).__name__}: {error}") from error
        if subject.calls != calls + 1:
            raise Wrong("why_not accepted the call, then refused it: it is not pure")
        if (given := _described(outcome.outputs)) != shapes:
            raise Wrong(f"returned {given}; the reference gives {shapes}")
        try:
            for number, block in enumerate(blocks):
                exact, native = (
                    expected[number]
                    if expected
                    else judge.expected(block, dys, self.with_grad, judge.prescribed(block, outcome.outputs))
                )
                judge.compare(block, outcome, exact, native)
        except Wrong as wrong:
            early.require_unchanged(wait=True)
            raise wrong
        early.require_unchanged()
        if self.with_grad and subject.dtype.itemsize < 4:
            self._compare_last_rows(blocks, arguments, outcome, dys)
        return ()

    def _compare_last_rows(
        self, blocks: Sequence[Block], arguments: Mapping[str, Any], outcome: Outcome, dys: Sequence[Tensor]
    ) -> None:
        """Compares sums over rows to which only the last rows add. dys: are overwritten. Raises Wrong."""
        sums = [of_last for block in blocks if (of_last := block.of_last_rows()) is not None]
        if not sums:
            return
        for dy in dys:
            dy[:-RUN].zero_()
        op, judge = self.subject.op, self.judge
        outcome.gradients = {}
        try:
            # The backward pass of a composition may run once only.
            again = run(op, op, arguments, True) if self.subject.impl.composed else outcome
            again.gradients = backward(again, dys)
        except Exception as error:
            raise Wrong(f"the second backward pass raised {type(error).__name__}: {error}") from error
        for block in sums:
            judge.compare(block, again, *judge.expected(block, dys, True))

    def _require_memory(self) -> dict[str, str]:
        """The shapes and dtypes of the outputs. Raises _NoMemory if the call needs more memory than there is.

        Needed: the arguments and the outputs, and with gradients those and the upstream gradients.
        """
        subject, op = self.subject, self.subject.op
        meta = bind(op, *_build(self.sample, subject.dtype, torch.device("meta")))
        if "device" in meta:
            meta["device"] = torch.device("meta")
        with activated(Reference()):
            outcome = run(op, op.reference, meta, self.with_grad)
        given = sum(x.nbytes for _, _, x in tensors(meta))
        results = sum(x.nbytes for x in outcome.outputs.values() if isinstance(x, Tensor)) if not op.mutates else 0
        differentiated = sum(x.nbytes for x in outcome.leaves.values())
        needed = given + results + (results + differentiated if self.with_grad else 0)
        free = subject.backend.memory_stats().get("free")
        if free is None and subject.device.type == "cpu":
            free = _host_memory()
        if free is not None and needed > 0.9 * free:
            raise _NoMemory(f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")
        return _described(outcome.outputs)


def _described(outputs: Mapping[str, Any]) -> dict[str, str]:
    """The dtype and shape of every output, or what else it is, by label."""
    return {
        label: f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        for label, y in outputs.items()
    }


def _build(sample: Sample, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As Sample.build, for large tensors."""
    count = 0

    def make(value: Any) -> Any:
        nonlocal count
        if isinstance(value, TensorSpec):
            count += 1
            return _fill(value, dtype, device, count)
        if isinstance(value, DtypeSpec):
            return dtype
        return [make(v) for v in value] if isinstance(value, list) else value

    args = tuple(make(v) for v in sample.args)
    return args, {name: make(value) for name, value in sample.kwargs.items()}


def _fill(spec: TensorSpec, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """As TensorSpec.build, contiguous and with values that repeat, so that no copy in float64 is made of all of it."""
    count = math.prod(spec.shape)
    if device.type == "meta":
        # The starts of packed sequences, which the reference reads, are the only explicit integers.
        if spec.dist == "values" and not (spec.dtype or dtype).is_floating_point:
            return spec.build(dtype, seed)
        return torch.empty(spec.shape, dtype=spec.dtype or dtype, device=device)
    if spec.dist == "values" or count <= _PERIOD:
        return spec.build(dtype, seed).to(device)
    pool = TensorSpec((_PERIOD,), spec.dist, spec.scale, spec.low, spec.high, spec.p, dtype=spec.dtype)
    values = pool.build(dtype, seed).to(device)
    flat = torch.empty(count, dtype=values.dtype, device=device)
    for start in range(0, count, _PERIOD):
        piece = flat[start : start + _PERIOD]
        piece.copy_(values[: len(piece)])
    return flat.view(spec.shape)


def _release_memory() -> None:
    """Frees what a call has left: graphs that refer to themselves, and freed host memory that glibc keeps."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def _host_memory() -> int | None:
    """Bytes of host memory that are free, as reported by the system."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
