"""The engine of the conformance kit, used by both `hal parity` and pytest.

`run(backend)` checks every registered implementation of every op, not only the preferred one, and returns a `Report`.
Nothing is skipped silently: a refused call is counted with its reasons, an implementation that ran no call at all
fails, and an op without an implementation is listed. Needs hypothesis; does not need pytest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import Flaky, FlakyFailure

import hal
import hal.ops  # defines the ops
from hal.core.adapters import require_same_signature, require_takes_call
from hal.core.backend import Backend, Impl, Unavailable
from hal.core.op import OPS, Op, Sample, TensorSpec
from hal.errors import HalError

from . import golden
from .calls import not_stored
from .checks import Verdict, check_sample
from .device_checks import DEVICE, check_device
from .lowering import check_lowered, untraced
from .parity_rows import NO_IMPLEMENTATION, Report, Row, shortened
from .probe import ProbeFailure, check_probe
from .production.check import check_production
from .rng_checks import check_order, edge_samples
from .sharded import SHARDED, check_sharded, sharded_samples
from .shrinking import shrink
from .state_checks import check_state, sample_for_state
from .subject import Failure, Subject
from .support import facts

EXAMPLES = 25
"""Random calls per implementation and dtype, in addition to the op's edge cases."""

RANKS = (2, 3)

GOLDEN = "golden_loss"

QUICK_SECONDS = 45.0
"""The time of all rows together with `quick`."""

SCALES = ("default", "production")
"""Tiers of the kit: small calls that are compared completely, and calls at the sizes of models, compared in part."""


def run(
    backend: Backend,
    *,
    ops: Iterable[str] | None = None,
    examples: int = EXAMPLES,
    seed: int = 0,
    scale: str = "default",
    dtypes: Collection[torch.dtype] | None = None,
    quick: bool = False,
    on_row: Callable[[Row], None] | None = None,
    on_call: Callable[[str, int], None] | None = None,
) -> Report:
    """Runs the kit on a backend that has been probed and built (`hal.use` does both).

    ops: names, "golden_loss" for the golden losses, "device" for the capabilities (default tier only); default all.
    examples: random calls per implementation and dtype of the default tier. scale: one of SCALES. dtypes: those to run;
    default all of each op's tolerances. quick: as many calls of the default tier as fit into about a minute, at least
    one per row, and no golden losses. on_row: called with each row as soon as it is known. on_call(row, calls):
    called before the first call of a row, with 0, and after each, with the row's name and the number of calls made.
    Raises HalError for an unknown op or scale.
    """
    report = Report(backend.name, backend.simulated)

    def add(row: Row) -> None:
        report.rows.append(row)
        if on_row is not None:
            on_row(row)

    names = None if ops is None else list(ops)
    if scale not in SCALES:
        raise HalError(f"the kit has no scale {scale!r}; scales: {', '.join(SCALES)}")
    if scale == "production":
        for row in check_production(
            backend, chosen_ops(names), seed=seed, dtypes=dtypes, on_call=on_call or (lambda row, calls: None)
        ):
            add(row)
        return report
    chosen = chosen_ops(names)
    effort = Effort(examples, seed, on_call=on_call)
    if quick:
        # Equal shares, because a slow row would otherwise take the time of those behind it.
        rows = sum(len(backend.implementations(op)) * len(op.tol) for op in chosen)
        effort = replace(effort, seconds=QUICK_SECONDS / max(1, rows))
    for op in chosen:
        for row in check_op(backend, op, effort, dtypes):
            add(row)
    if names is None or DEVICE in names:
        for row in check_device(backend):
            add(row)
    if not quick and (names is None or GOLDEN in names):
        for row in golden.check_golden(backend):
            if dtypes is None or row.dtype in {str(dtype).removeprefix("torch.") for dtype in dtypes}:
                add(row)
    return report


def run_by_name(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    ops: Iterable[str] | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
    **settings: Any,
) -> Report:
    """Checks the probe of the backend `name`, makes it active, and runs the kit on it with the `settings` of `run`.

    Raises BackendNotFound, PluginError, BackendUnavailable, or HalError for an unknown op.
    """
    names = None if ops is None else list(ops)
    chosen_ops(names)
    probe = probe_row(name, options)
    backend = hal.use(name, **(options or {}))
    probe.simulated, probe.facts = backend.simulated, facts(backend)
    on_row(probe)
    report = run(backend, ops=names, on_row=on_row, **settings)
    report.rows.insert(0, probe)
    return report


def probe_row(name: str, options: Mapping[str, Any] | None = None) -> Row:
    """The row about the probe of the backend `name`; to be called before the backend is used."""
    try:
        check_probe(name, options)
    except ProbeFailure as failure:
        return Row("probe", "-", name, False, "fail", 1, None, message=str(failure))
    return Row("probe", "-", name, False, "pass", 1, None)


def chosen_ops(names: Iterable[str] | None) -> list[Op]:  # type: ignore[type-arg]
    """The ops called `names` (None = all). Raises HalError for one that does not exist."""
    if names is None:
        return list(OPS.values())
    wanted = [n for n in names if n not in (GOLDEN, DEVICE)]
    unknown = [n for n in wanted if n not in OPS]
    if unknown:
        raise HalError(f"no op is called {', '.join(map(repr, unknown))}; ops: {', '.join(OPS)}, {GOLDEN}, {DEVICE}")
    return [OPS[n] for n in wanted]


@dataclass(frozen=True)
class Effort:
    """How many calls a row makes: all edge cases and `examples` random calls drawn from `seed`.

    seconds: a row makes no further call after this time. on_call: see `run`.
    """

    examples: int = EXAMPLES
    seed: int = 0
    seconds: float | None = None
    on_call: Callable[[str, int], None] | None = None


def check_op(
    backend: Backend,
    op: Op,  # type: ignore[type-arg]
    effort: Effort = Effort(),
    dtypes: Collection[torch.dtype] | None = None,
) -> Iterator[Row]:
    """One row per implementation and dtype of one op, and one for its lowered form in float32.

    The latter is not run if another row of float32 failed.
    """
    impls = backend.implementations(op)
    if not impls:
        for dtype in op.tol:
            if dtypes is None or dtype in dtypes:
                yield _row(backend, op, dtype, "declined", reasons=[NO_IMPLEMENTATION])
        return
    wrong = False
    for impl in impls:
        if dtypes is None:
            rows = check_implementation(backend, impl, effort)
        else:
            rows = (check_dtype(backend, impl, dtype, effort) for dtype in op.tol if dtype in dtypes)
        for row in rows:
            wrong |= row.status == "fail" and row.dtype == "float32"
            yield row
    if dtypes is None or torch.float32 in dtypes:
        yield untraced(backend, op) if wrong else check_lowered(backend, op)


def check_implementation(backend: Backend, impl: Impl, effort: Effort) -> Iterator[Row]:
    """One row per dtype of the op; an implementation that ran no call in any of them fails in all, unless it says that
    it is `Unavailable`, or is a composition of ops that the backend lacks, or the device stores the tensors of no call,
    or it is checked between processes.
    """
    rows = [check_dtype(backend, impl, dtype, effort) for dtype in impl.op.tol]
    # Not a fault of the backend: a composition whose parts it lacks, and an op whose dtypes its device does not store.
    excused = any(isinstance(reason, Unavailable) for row in rows for reason in row.reasons)
    excused |= impl.composed and not all(map(backend.implementations, impl.op.parts))
    stored, samples = backend.capabilities().dtypes, impl.op.edge_cases()
    excused |= bool(samples) and all(not_stored(sample, stored) for sample in samples)
    if impl.op.name in SHARDED and SHARDED[impl.op.name].communicates_back and not impl.composed:
        excused = True
        for row in rows:
            row.reasons = [*row.reasons, "checked between processes: hal parity --collectives"]
    if not excused and not any(row.samples or row.status == "fail" for row in rows):
        for row in rows:
            row.status = "fail"
            row.message = f"implementation '{impl.id}' ran no sample at all: every call was refused"
            row.message += f" ({'; '.join(row.reasons[:3])})" if row.reasons else ""
    yield from rows


def check_dtype(backend: Backend, impl: Impl, dtype: torch.dtype, effort: Effort) -> Row:
    """All checks of one implementation in one dtype."""
    subject = Subject(backend, impl, dtype)
    tally = _Tally(subject, effort)
    tally.begin()
    try:
        _check_signatures(subject)
        with subject:
            failures = list(_edge_cases(subject, tally))
            if failures:
                raise _smallest(subject, failures)
            if tally.samples:
                _state(subject)
            _explore(subject, tally, effort)
    except Failure as failure:
        row = _row(backend, impl.op, dtype, "fail", impl, tally, subject.worst)
        row.worst_error_in_tolerances = failure.error if tally.samples == 0 else max(failure.error, subject.worst)
        row.message, row.code = failure.message, failure.snippet()
        return row
    if tally.samples == 0:
        return _row(backend, impl.op, dtype, "declined", impl, tally)
    row = _row(backend, impl.op, dtype, "pass", impl, tally, subject.worst)
    if subject.waiver != 1.0:
        row.status = "waived"
        row.reasons.insert(0, f"waiver x{subject.waiver:g}: {subject.waiver_reason}")
    return row


_COMPILED_SHAPES = 8


def _shapes(sample: Sample) -> tuple[tuple[int, ...], ...]:
    """The shapes of a sample's tensors."""
    values = (*sample.args, *sample.kwargs.values())
    flat = (spec for value in values for spec in (value if isinstance(value, list) else [value]))
    return tuple(spec.shape for spec in flat if isinstance(spec, TensorSpec))


class _Tally:
    """The calls that ran, and the reasons of those that were declined, for one row."""

    def __init__(self, subject: Subject, effort: Effort) -> None:
        self.samples = 0
        self.declined: list[str] = []
        self._row, self._on_call = str(subject), effort.on_call
        self._static_shapes = subject.backend.capabilities().static_shapes
        self._compiled: set[tuple[tuple[int, ...], ...]] = set()
        self._end = math.inf if effort.seconds is None else time.monotonic() + effort.seconds

    def begin(self) -> None:
        """Reports the row before its first call, which may end the process."""
        if self._on_call is not None:
            self._on_call(self._row, 0)

    @property
    def full(self) -> bool:
        """Whether the row has run a call and its time is over."""
        return self.samples > 0 and time.monotonic() > self._end

    def may_compile(self, sample: Sample) -> bool:
        """Whether the sample's shapes may be run: on a device that compiles for shapes, if they were drawn before or
        are among the first _COMPILED_SHAPES combinations.
        """
        shapes = _shapes(sample)
        if self._static_shapes and shapes not in self._compiled and len(self._compiled) == _COMPILED_SHAPES:
            return False
        self._compiled.add(shapes)
        return True

    def add(self, verdict: Verdict) -> None:
        if verdict.declined:
            self.declined.extend(verdict.declined)
        else:
            self.samples += 1
        if self._on_call is not None:
            self._on_call(self._row, self.samples)


def _smallest(subject: Subject, failures: Sequence[Failure]) -> Failure:
    """The failure with the shortest call, whose sizes are reduced while it still fails."""
    failure = min(failures, key=lambda f: len(f.snippet()))
    # A failure of a draw's order or of several ranks is not repeated by running its sample alone.
    if failure.sample is None or failure.check or failure.ranks:
        return failure
    failures = [failure]

    def fails(sample: Sample) -> bool:
        try:
            check_sample(subject, sample)
        except Failure as smaller:
            failures.append(smaller)
            return True
        return False

    shrink(subject.op, failure.sample, subject.dtype, fails)
    return failures[-1]


def _edge_cases(subject: Subject, tally: _Tally) -> Iterator[Failure]:
    """The failures among the calls that are not random: edge cases, dropout edges, sharded, order of draws."""
    name = subject.op.name
    for sample in [*subject.op.edge_cases(), *edge_samples(name)]:
        if tally.full:
            return
        try:
            tally.add(check_sample(subject, sample))
        except Failure as failure:
            yield failure
    try:
        if name in SHARDED and not (SHARDED[name].communicates_back and subject.device.type != "cpu"):
            for ranks in RANKS:
                for sample in sharded_samples(name, ranks):
                    tally.add(check_sharded(subject, sample, ranks))
        tally.samples += check_order(subject)
    except Failure as failure:
        yield failure


def _state(subject: Subject) -> None:
    """Calls that follow one another, of one edge case. Raises Failure."""
    sample = sample_for_state(subject, subject.op.edge_cases())
    if sample is not None:
        check_state(subject, sample)


def _explore(subject: Subject, tally: _Tally, effort: Effort) -> None:
    """Runs random calls; hypothesis shrinks one that fails. Raises Failure.

    Calls whose shapes are one combination too many for a device that compiles for shapes are skipped.
    """
    if effort.examples <= 0 or tally.full:
        return
    last: list[Failure] = []

    @hypothesis.seed(effort.seed)
    @settings(
        max_examples=effort.examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(subject.op.samples())
    def call(sample: Sample) -> None:
        # Once a call has failed, the time limit no longer applies: hypothesis must still be able to shrink it.
        if tally.full and not last:
            return
        if not last and not tally.may_compile(sample):
            return
        try:
            tally.add(check_sample(subject, sample))
        except Failure as failure:
            last.append(failure)
            raise

    try:
        call()
    except (Flaky, FlakyFailure) as error:
        raise subject.fail(
            f"a call sometimes fails and sometimes passes; it failed with: {last[-1].message}", last[-1].sample
        ) from error


def _check_signatures(subject: Subject) -> None:
    impl = subject.impl
    try:
        require_same_signature(impl.op, impl.forward, f"implementation '{impl.id}'")
        require_takes_call(impl.why_not, f"why_not of implementation '{impl.id}'")
    except HalError as error:
        raise subject.fail(str(error), None) from error


def _row(
    backend: Backend,
    op: Op,  # type: ignore[type-arg]
    dtype: torch.dtype,
    status: str,
    impl: Impl | None = None,
    tally: _Tally | None = None,
    worst: float | None = None,
    reasons: Sequence[str] = (),
) -> Row:
    stand_in = [backend.stand_ins[impl.id]] if impl and impl.id in backend.stand_ins else []
    return Row(
        op.name,
        str(dtype).removeprefix("torch."),
        backend.name,
        backend.simulated,
        status,
        tally.samples if tally else 0,
        worst,
        [*stand_in, *(shortened(tally.declined) if tally else reasons)],
        impl.id if impl else None,
    )


def replay(
    op: Op,  # type: ignore[type-arg]
    sample: Sample,
    dtype: torch.dtype,
    *,
    implementation: str,
    check: str = "",
    ranks: int = 0,
) -> Verdict:
    """Repeats one call on the active backend with all its checks; the code in a report calls this.

    Raises Failure exactly as the kit did, or HalError if there is no such implementation.
    """
    backend = hal.backend()
    impls = {impl.id: impl for impl in backend.implementations(op)}
    if implementation not in impls:
        raise HalError(
            f"backend '{backend.name}' has no implementation '{implementation}' of {op.name}; it has {list(impls)}"
        )
    with Subject(backend, impls[implementation], dtype) as subject:
        if check in ("order", "state"):
            check_order(subject) if check == "order" else check_state(subject, sample)
            return Verdict((), 0.0)
        return check_sharded(subject, sample, ranks) if ranks else check_sample(subject, sample)
