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
from hal.core.op import Op, Sample, TensorSpec
from hal.errors import HalError, UnsupportedOp

from .. import hints
from ..calls import Outcome, backward, bind, map_tensors, run, tensors, to_double
from ..checks import wrong_choices
from ..comparison import errors, measure
from ..parity_rows import NO_IMPLEMENTATION, Row, shortened
from ..reference import Reference
from ..subject import Subject
from .blocks import Block
from .cases import Case, cases

_PERIOD = (1 << 22) - 3
"""Elements after which generated values repeat: odd, so that a wrapped offset does not meet equal values."""


def check_production(
    backend: Backend,
    ops: Sequence[Op[Any, Any]],
    *,
    seed: int = 0,
    dtypes: Collection[torch.dtype] | None = None,
    reduced: bool | None = None,
) -> Iterator[Row]:
    """One row per implementation and dtype of the ops; dtypes: those to run, default all of each op's tolerances.

    reduced: small forms of the calls, for simulators; default: if the backend is simulated. A call for which memory is
    missing, or which every implementation refuses although some run other calls in its dtype, has status "not run".
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
                row, refusals = _check_dtype(Subject(backend, impl, dtype), of_dtype, small, seed)
                ran |= row.samples > 0
                refused.append(refusals)
                yield row
            nowhere = [name for name in (refused[0] if refused else ()) if all(name in r for r in refused)]
            if ran and nowhere:
                reasons = [f"{name}: refused by every implementation ({refused[0][name]})" for name in nowhere]
                yield _row(backend, op, dtype, None, "not run", reasons)


def _row(
    backend: Backend, op: Op[Any, Any], dtype: torch.dtype, impl: Impl | None, status: str, reasons: list[str]
) -> Row:
    name = str(dtype).removeprefix("torch.")
    return Row(op.name, name, backend.name, backend.simulated, status, 0, None, reasons, impl.id if impl else None)


def _check_dtype(subject: Subject, chosen: Sequence[Case], small: bool, seed: int) -> tuple[Row, dict[str, str]]:
    """The row of an implementation in one dtype, and the reasons of the calls that it refused, by case."""
    backend, op = subject.backend, subject.op
    row = _row(backend, op, subject.dtype, subject.impl, "pass", [])
    failures: list[str] = []
    declined: dict[str, str] = {}
    not_run: list[str] = []
    with subject:
        for case in chosen:
            sample = case.reduced if small else case.sample
            assert sample is not None
            try:
                reasons = _Call(subject, case, sample, seed).check()
                if reasons:
                    declined[case.name] = "; ".join(reasons)
                row.samples += not reasons
            except _NoMemory as missing:
                not_run.append(f"{case.name}: {missing}")
            except _Wrong as wrong:
                failures.append(f"{case.name}: {wrong}")
                subject.worst = max(subject.worst, wrong.tolerances)
            finally:
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


class _Wrong(AssertionError):
    """A result that is outside its tolerance, or an exception, in words. tolerances: the error."""

    def __init__(self, text: str, tolerances: float = math.inf) -> None:
        super().__init__(text)
        self.tolerances = tolerances


class _NoMemory(Exception):
    """A call needs more memory than there is, in words."""


class _Call:
    """One case on one implementation in one dtype."""

    def __init__(self, subject: Subject, case: Case, sample: Sample, seed: int) -> None:
        self.subject, self.case, self.sample = subject, case, sample
        self.random = random.Random(f"{seed} {case.op} {case.name}")
        self.with_grad = bool(subject.op.grads) and sample.grad

    def check(self) -> tuple[str, ...]:
        """Runs and compares the call; the reasons if the implementation declines it. Raises _Wrong and _NoMemory."""
        subject, op = self.subject, self.subject.op
        shapes = self._require_memory()
        arguments = bind(op, *_build(self.sample, subject.dtype, subject.device))
        self.case.plant(arguments)
        call = op.Call(**arguments)
        op.check(call)
        try:
            reasons = subject.impl.refusals(call)
        except Exception as error:
            raise _Wrong(f"why_not raised {type(error).__name__}: {error}") from error
        if reasons:
            return reasons
        blocks = list(self.case.blocks(arguments, self.random))
        # A call that writes in place is compared with what the reference makes of copies taken before.
        expected = [self._expected(block, []) for block in blocks] if op.mutates else []
        calls, dys = subject.calls, []
        try:
            # The results are read as a model reads them: without synchronising the device.
            outcome = run(op, op, arguments, self.with_grad)
            if self.with_grad:
                dys = [_fill(TensorSpec(tuple(y.shape)), y.dtype, subject.device, 99) for y in outcome.differentiable]
                outcome.gradients = backward(outcome, dys)
        except UnsupportedOp as error:
            if subject.impl.composed:  # one of the ops that it calls is refused
                return (str(error).splitlines()[0],)
            raise _Wrong(f"accepted the call and raised UnsupportedOp: {error}") from error
        except Exception as error:
            raise _Wrong(f"accepted the call and raised {type(error).__name__}: {error}") from error
        if subject.calls != calls + 1:
            raise _Wrong("why_not accepted the call, then refused it: it is not pure")
        if (given := _described(outcome.outputs)) != shapes:
            raise _Wrong(f"returned {given}; the reference gives {shapes}")
        for number, block in enumerate(blocks):
            exact, native = (
                expected[number] if expected else self._expected(block, dys, self._prescribed(block, outcome))
            )
            self._compare(block, outcome, exact, native)
        return ()

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

    def _prescribed(self, block: Block, outcome: Outcome) -> dict[str, Tensor]:
        """The choice of the implementation, as an argument of the reference; {} for an op that chooses nothing.

        Raises _Wrong if rounding does not explain it.
        """
        choice = self.subject.op.choice
        if choice is None:
            return {}
        label, pick = block.outputs[f"output {choice.output}"]
        chosen = pick(outcome.outputs[label].detach()).cpu()
        (part,) = block.parts()
        rows = wrong_choices(self.subject.op, choice, to_double(part.arguments), chosen)
        if rows.numel():
            found = chosen[rows[0]].tolist()
            raise _Wrong(f"{label}, {block.name}: {found} in row {int(rows[0])} is not the choice of the reference")
        return {choice.parameter: chosen}

    def _expected(
        self, block: Block, dys: Sequence[Tensor], prescribed: Mapping[str, Tensor] = {}
    ) -> tuple[Outcome, Outcome]:
        """The block by the reference in float64, and in the dtype under test. prescribed: replaces arguments."""

        def in_double(arguments: Mapping[str, Any]) -> dict[str, Any]:
            return to_double({**arguments, **prescribed})

        def as_it_is(arguments: Mapping[str, Any]) -> dict[str, Any]:
            return _copies({**arguments, **prescribed})

        with activated(Reference()):
            return self._reference(block, dys, in_double), self._reference(block, dys, as_it_is)

    def _reference(self, block: Block, dys: Sequence[Tensor], convert: Callable[[Any], dict[str, Any]]) -> Outcome:
        """The reference's results, of arguments that `convert` has made; gradients of parts are added in float64."""
        op, total = self.subject.op, None
        for part in block.parts():
            outcome = run(op, op.reference, convert(part.arguments), self.with_grad)
            if self.with_grad:
                upstream = [part.upstream(dy).cpu() for dy in dys]
                outcome.gradients = backward(
                    outcome, [dy.to(y.dtype) for dy, y in zip(upstream, outcome.differentiable)]
                )
            if total is None:
                total = outcome
                continue
            for name in block.gradients:
                terms = [x.double() for x in (total.gradients.get(name), outcome.gradients.get(name)) if x is not None]
                total.gradients[name] = sum(terms[1:], start=terms[0]) if terms else None
        assert total is not None
        return total

    def _compare(self, block: Block, outcome: Outcome, exact: Outcome, native: Outcome) -> None:
        subject = self.subject
        pairs: list[tuple[str, Tensor, Tensor, Tensor, bool]] = []
        try:
            for of_part, (label, pick) in block.outputs.items():
                y = pick(outcome.outputs[label].detach()).cpu()
                pairs.append((label, y, exact.outputs[of_part], native.outputs[of_part], False))
            for name in [name for name in block.gradients if name in outcome.gradients]:
                got, right, rounded = outcome.gradients[name], exact.gradients[name], native.gradients[name]
                if got is None or right is None or rounded is None:
                    raise _Wrong(f"{block.name}: the gradient of {name} is missing (None)")
                if got.shape != outcome.leaves[name].shape or got.dtype != outcome.leaves[name].dtype:
                    raise _Wrong(f"the gradient of {name} is {got.dtype} {tuple(got.shape)}")
                y = block.gradients[name](got).cpu()
                pairs.append((f"the gradient of {name}", y, right, rounded.to(got.dtype), True))
        except RuntimeError as error:  # errors of asynchronous work surface when its results are read
            raise _Wrong(f"{block.name}: reading the results raised {type(error).__name__}: {error}") from error
        if not pairs and self.with_grad:
            raise HalError(f"{self.case.op}, {self.case.name}: nothing of {block.name} was compared")
        for label, y, right, rounded, gradient in pairs:
            result = measure(y, right, rounded, subject.tol, subject.dtype, gradient=gradient)
            subject.worst = max(subject.worst, result.tolerances)
            if result.tolerances > subject.waiver:
                wrong = errors(y, right, rounded, subject.tol, subject.dtype, gradient=gradient) > subject.waiver
                text = f"{label}, {block.name}: {result.text} (allowed: {subject.waiver:g})"
                raise _Wrong(text + hints.as_text(hints.pattern(wrong, y, right)), result.tolerances)


def _described(outputs: Mapping[str, Any]) -> dict[str, str]:
    """The dtype and shape of every output, or what else it is, by label."""
    return {
        label: f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        for label, y in outputs.items()
    }


def _copies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return map_tensors(arguments, lambda x: x.detach().cpu().clone())


def _build(sample: Sample, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As Sample.build, for large tensors."""
    count = 0

    def make(value: Any) -> Any:
        nonlocal count
        if isinstance(value, TensorSpec):
            count += 1
            return _fill(value, dtype, device, count)
        return [make(v) for v in value] if isinstance(value, list) else value

    args = tuple(make(v) for v in sample.args)
    return args, {name: make(value) for name, value in sample.kwargs.items()}


def _fill(spec: TensorSpec, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """As TensorSpec.build, contiguous and with values that repeat, so that no copy in float64 is made of all of it."""
    count = math.prod(spec.shape)
    if device.type == "meta" and spec.dist != "values":
        return torch.empty(spec.shape, dtype=spec.dtype or dtype, device=device)
    if device.type == "meta":  # the starts of packed sequences, which the reference reads
        return spec.build(dtype, seed)
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
    """Bytes of host memory that are free, as far as the system says."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
