"""All checks that are made with a single call of an implementation.

`check_sample` raises `Failure` unless: why_not is pure, gives the same reasons for meta tensors, and the implementation
runs exactly when there are none; outputs and gradients are within tolerance of the float64 reference; nothing but
`op.mutates` is written, not even between the elements of a strided argument; outputs do not share memory with
arguments; a second call and a second backward give the same bits, with and without autograd; results that are read
without synchronising the device are complete, also if the arguments are overwritten as soon as the call has returned;
non-contiguous upstream gradients are accepted; and all memory of the call is freed once its results and its graph are
deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from hal.core.autograd import takes_needs
from hal.core.dispatch import activated
from hal.core.op import Choice, Op, Sample
from hal.errors import UnsupportedOp
from hal.rng import Rng

from . import hints
from .calls import (
    Outcome,
    backward,
    build,
    invoke,
    map_tensors,
    not_stored,
    run,
    scattered,
    tensors,
    to_double,
    to_meta,
    upstream,
)
from .comparison import Error, Expected, equal_bits, raw
from .reference import Reference
from .subject import Subject


@dataclass(frozen=True)
class Verdict:
    """declined: the reasons, empty if the call ran. tolerances: the largest error of all comparisons."""

    declined: tuple[str, ...]
    tolerances: float


LATE_SECONDS = 0.05
"""After which a wrong result is read again."""

_weak: Any = reductions.StorageWeakRef
_Watched = list[tuple[str, Any]]


def check_sample(subject: Subject, sample: Sample) -> Verdict:
    """Checks one call; to be used inside `with subject:`. Raises Failure."""
    watched: _Watched = []
    verdict = _check_call(subject, sample, watched)
    if _not_freed(watched):
        subject.backend.synchronize()  # work that still runs may hold memory
        gc.collect()  # only now, because it takes longer than most calls
    # A runtime with threads of its own may drop its last reference shortly after it has announced the result.
    until = time.monotonic() + subject.release_seconds
    while (leaked := _not_freed(watched)) and time.monotonic() < until:
        time.sleep(0.01)
    if not leaked:
        return verdict
    subject.release_seconds = 0.0  # waiting again for each call by which the failure is shrunk would take minutes
    raise subject.fail(
        f"the memory of {', '.join(leaked)} is not freed after the call, its results and its graph are deleted: "
        "the implementation keeps a reference, so memory grows from call to call",
        sample,
    )


def _not_freed(watched: _Watched) -> list[str]:
    """The labels of the storages that still exist."""
    return list(dict.fromkeys(label for label, memory in watched if not memory.expired()))


def _watch(watched: _Watched, values: Mapping[str, Any]) -> None:
    """Adds weak references to the storages of all tensors among `values`."""
    watched += [(label, _weak(x.untyped_storage())) for _, label, x in tensors(values) if _strided(x)]


def _check_call(subject: Subject, sample: Sample, watched: _Watched) -> Verdict:
    """check_sample without the last requirement, for which it adds all tensors of the call to `watched`.

    It is a separate function so that no local variable refers to those tensors when they should have been freed.
    """
    op, dtype = subject.op, subject.dtype
    if not_storable := not_stored(sample, subject.stored):
        return Verdict(not_storable, 0.0)
    arguments = _build(subject, sample)
    _watch(watched, arguments)
    # First what the call must refuse, then the call and its backward pass, then what they left behind, and at the end
    # repetitions. The comparison comes before the repetitions, because a wrong result is the better message.
    op.check(op.Call(**arguments))
    reasons = _ask(subject, sample, arguments)
    if not reasons and subject.impl.composed:
        try:
            invoke(op, op, arguments)
        except UnsupportedOp as error:  # one of the ops that it calls is refused
            return Verdict((str(error).splitlines()[0],), 0.0)
    if reasons:
        _must_stay_idle(subject, sample, arguments, reasons)
        return Verdict(reasons, 0.0)

    oracle, native, dys = references(subject, sample)
    with_grad = bool(op.grads) and sample.grad
    dys_there = [dy.to(subject.device) for dy in dys]
    before, settings = _Memory(op.mutates, {**arguments, "the upstream gradient": dys_there}), _settings()
    outcome = _run(subject, sample, arguments, with_grad)
    if set(outcome.outputs) != set(native.outputs):
        raise subject.fail(f"returned {sorted(outcome.outputs)}, the reference {sorted(native.outputs)}", sample)
    for name, y in native.outputs.items():
        _must_look_like(subject, sample, name, outcome.outputs[name], y)
    # Of nearly equal scores rounding decides which is chosen. The rest is compared for the implementation's own choice,
    # after that has been checked.
    if op.choice is not None and arguments[op.choice.parameter] is None:
        chosen = _right_choice(subject, sample, op.choice, outcome)
        oracle, native, dys = references(subject, sample, {op.choice.parameter: chosen})
    _watch(watched, outcome.outputs)
    if with_grad:
        _must_save_tensors_directly(subject, sample, outcome)
        outcome.gradients = _backward(subject, sample, outcome, dys_there)
        _watch(watched, {"the upstream gradient": dys_there})
        _watch(watched, {f"the gradient of {name}": x for name, x in outcome.gradients.items()})
    _must_be_untouched(subject, sample, before)
    _must_not_alias(subject, sample, arguments, outcome)
    worst = _compare(subject, sample, outcome, oracle, native)
    if with_grad:
        again = _backward(subject, sample, _for_backward(subject, sample, arguments, outcome), dys_there)
        for name, first in outcome.gradients.items():
            second = again[name]
            if first is not None and second is not None and not subject.repeats(first, second):
                raise subject.fail(f"the gradient of {name} differs in bits when backward runs twice", sample)
        # Upstream gradients of real models are often views, of which a kernel must not read the base.
        third = _for_backward(subject, sample, arguments, outcome)
        outcome.gradients = _backward(subject, sample, third, [scattered(dy) for dy in dys_there])
        worst = max(worst, _compare(subject, sample, outcome, oracle, native, " (upstream gradient not contiguous)"))
        if subject.impl.bwd is not None and takes_needs(subject.impl.bwd):
            _must_not_depend_on_needs(subject, sample, arguments, again, dys_there)
        _must_not_depend_on_hints(subject, sample, again, dys_there)
    repeated = _run(subject, sample, build(op, sample, dtype, subject.device), False, overwrite=True)
    for name, y in outcome.outputs.items():
        if not subject.repeats(y, repeated.outputs[name]):
            # Within tolerance the bits differ only: an implementation that is not deterministic. Otherwise it computed
            # from the overwritten arguments.
            off = Expected(oracle.outputs[name], native.outputs[name], subject.tol, dtype).measure(
                repeated.outputs[name]
            )
            if off.tolerances <= subject.waiver:
                raise subject.fail(f"{name} differs in bits in a second, equal call (without autograd)", sample)
            raise subject.fail(
                f"{name} is wrong if the arguments are overwritten once the call has returned: it still reads them",
                sample,
            )
    for name, value in _settings().items():
        if value != settings[name]:
            raise subject.fail(f"the call changed {name}, which belongs to the whole process", sample)
    return Verdict((), worst)


def _settings() -> dict[str, object]:
    return {
        "the state of torch's random generator": torch.get_rng_state().numpy().tobytes(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's grad mode": torch.is_grad_enabled(),
    }


def _right_choice(subject: Subject, sample: Sample, choice: Choice, outcome: Outcome) -> Tensor:
    """The implementation's choice, on the CPU. Raises Failure if it is not one that rounding explains."""
    name = f"output {choice.output}"
    given = to_double(build(subject.op, sample, subject.dtype))
    chosen = outcome.outputs[name].detach().cpu()
    wrong = wrong_choices(subject.op, choice, given, chosen)
    if wrong.numel():
        row = int(wrong[0])
        with activated(_environment()):
            right = run(subject.op, subject.op.reference, given, False).outputs[name]
        raise subject.fail(
            f"{name}: {len(wrong)} of {len(chosen)} rows are not the choice of the reference, and rounding does not "
            f"explain it: row {row} is {chosen[row].tolist()}, float64 reference {right[row].tolist()}",
            sample,
        )
    return chosen


def wrong_choices(op: Op[Any, Any], choice: Choice, given: Mapping[str, Any], chosen: Tensor) -> Tensor:
    """The rows of a choice that are not right. given: the call's arguments in float64."""
    return (~choice.right(op.Call(**given), chosen)).nonzero().flatten()


def references(
    subject: Subject, sample: Sample, prescribed: Mapping[str, Tensor] | None = None
) -> tuple[Outcome, Outcome, list[Tensor]]:
    """(float64 oracle, reference in the dtype under test, upstream gradients), on the CPU.

    prescribed: arguments that replace those of the sample.
    """
    op, dtype = subject.op, subject.dtype
    with_grad = bool(op.grads) and sample.grad
    with activated(_environment()), one_thread():
        oracle = run(op, op.reference, to_double({**build(op, sample, dtype), **(prescribed or {})}), with_grad)
        native = run(op, op.reference, {**build(op, sample, dtype), **(prescribed or {})}, with_grad)
        dys = upstream(native.differentiable, seed=1)
        if with_grad:
            oracle.gradients = backward(oracle, [dy.double() for dy in dys])
            native.gradients = backward(native, dys)
    return oracle, native, dys


@functools.cache
def _environment() -> Reference:
    return Reference()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread: for tensors as small as the kit's, synchronising threads costs more than computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _build(subject: Subject, sample: Sample) -> dict[str, Any]:
    try:
        return build(subject.op, sample, subject.dtype, subject.device)
    except Exception as error:
        what = f"{subject.device} cannot hold the arguments: {type(error).__name__}: {error}"
        raise subject.fail(what, sample) from error


def _ask(subject: Subject, sample: Sample, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The reasons of why_not for a call. Raises Failure if it is not pure, or breaks the rules of `by_metadata`."""

    def ask(given: Mapping[str, Any], what: str) -> tuple[str, ...]:
        try:
            answer = subject.impl.why_not(subject.op.Call(**given))
        except Exception as error:
            raise subject.fail(f"why_not raised on {what}: {type(error).__name__}: {error}", sample) from error
        if isinstance(answer, str) or not isinstance(answer, Sequence):
            raise subject.fail(f"why_not must return a sequence of reasons, not {type(answer).__name__}", sample)
        if not all(isinstance(r, str) and r.strip() for r in answer):
            raise subject.fail(f"why_not must give reasons in words, not {answer!r}", sample)
        return tuple(answer)

    reasons = ask(arguments, "a valid call")
    if ask(arguments, "a valid call") != reasons:
        raise subject.fail(f"why_not is not pure: it said {list(reasons)}, then something else, of one call", sample)
    on_meta = ask(to_meta(arguments), "meta tensors")
    if on_meta != reasons:
        raise subject.fail(f"why_not says {list(reasons)} of the call, but {list(on_meta)} on meta tensors", sample)
    if subject.impl.by_metadata:
        # Such an answer is kept for all calls with equal shapes and dtypes, whatever their strides and seeds.
        others = map_tensors(to_meta(arguments), torch.Tensor.contiguous)
        for name, value in others.items():
            if isinstance(value, Rng):
                others[name] = Rng(value.seed ^ 1 << 40, value.offset ^ 1 << 20, value.full_shape, value.start)
        elsewhere = ask(others, "contiguous meta tensors")
        if elsewhere != reasons:
            raise subject.fail(
                f"why_not is marked by_metadata, but it says {list(reasons)} of the call and {list(elsewhere)} with "
                "contiguous tensors and another seed: it may look at neither",
                sample,
            )
    return reasons


def _must_save_tensors_directly(subject: Subject, sample: Sample, outcome: Outcome) -> None:
    """Fails residuals with a tensor inside of another value, which autograd neither frees nor checks for changes."""

    def holds_tensor(value: Any) -> bool:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = vars(value) if hasattr(value, "__dict__") else ()
        if isinstance(value, Mapping):
            value = tuple(value.values())
        return isinstance(value, Tensor) or (isinstance(value, (list, tuple, set)) and any(map(holds_tensor, value)))

    # The node in the graph of an implementation with a bwd is its context, see hal/core/autograd.py.
    plain = [r for y in outcome.differentiable for r in getattr(y.grad_fn, "plain", ())]
    nested = [type(value).__name__ for value in plain if holds_tensor(value)]
    if nested:
        raise subject.fail(
            f"the residuals hold a tensor inside of a {nested[0]}: a change in place before the backward remains "
            "unnoticed, and its memory is kept until the graph is deleted. Make it a direct member of the tuple",
            sample,
        )


def _must_not_depend_on_needs(
    subject: Subject, sample: Sample, arguments: Mapping[str, Any], all_: Mapping[str, Any], dys: Sequence[Tensor]
) -> None:
    for name, expected in all_.items():
        alone = _backward(subject, sample, _run(subject, sample, arguments, True, [name]), dys)[name]
        if expected is not None and (alone is None or not subject.repeats(alone, expected)):
            raise subject.fail(f"the gradient of {name} differs when it is the only one requested (needs)", sample)


def _must_not_depend_on_hints(
    subject: Subject, sample: Sample, expected: Mapping[str, Any], dys: Sequence[Tensor]
) -> None:
    for hint in subject.op.hints:
        arguments = {**build(subject.op, sample, subject.dtype, subject.device), hint: True}
        with_hint = _backward(subject, sample, _run(subject, sample, arguments, True), dys)
        for name, gradient in expected.items():
            other = with_hint[name]
            if gradient is not None and (other is None or not subject.repeats(other, gradient)):
                raise subject.fail(f"the gradient of {name} differs with {hint}=True, a hint", sample)


def _must_stay_idle(subject: Subject, sample: Sample, arguments: Mapping[str, Any], reasons: Sequence[str]) -> None:
    calls = subject.calls
    try:
        invoke(subject.op, subject.op, arguments)
    except UnsupportedOp as error:
        missing = [r for r in reasons if r not in str(error)]
        if missing:
            raise subject.fail(f"UnsupportedOp does not show the reasons {missing}", sample) from error
    except Exception as error:
        raise subject.fail(f"a refused call raised {type(error).__name__}: {error}", sample) from error
    if subject.calls != calls:
        raise subject.fail(
            f"why_not refused the call ({'; '.join(reasons)}), but the implementation was called", sample
        )


def _run(
    subject: Subject,
    sample: Sample,
    arguments: Mapping[str, Any],
    with_grad: bool,
    wanted: Sequence[str] | None = None,
    overwrite: bool = False,
) -> Outcome:
    """Executes the call. overwrite: whether its arguments are overwritten as soon as it has returned."""
    calls = subject.calls
    try:
        # Copies are made before the device is synchronised, as a model's next operation would read the results.
        outcome = run(subject.op, subject.op, arguments, with_grad, wanted)
        if overwrite:
            _overwrite({n: x for n, x in arguments.items() if n not in subject.op.mutates})
        early = _copies(outcome.outputs)
        subject.backend.synchronize()
    except Exception as error:
        raise subject.fail(f"accepted the call and raised {type(error).__name__}: {error}", sample) from error
    _must_have_been_done(subject, sample, early, outcome.outputs)
    if subject.calls != calls + 1:
        raise subject.fail("why_not accepted the call, then refused it: it is not pure", sample)
    return outcome


def _for_backward(subject: Subject, sample: Sample, arguments: Mapping[str, Any], outcome: Outcome) -> Outcome:
    """A call to run a further backward pass of: `outcome`, or a repetition where a composition may allow one only."""
    return _run(subject, sample, arguments, True) if subject.impl.composed else outcome


def _backward(subject: Subject, sample: Sample, outcome: Outcome, dys: Sequence[Tensor]) -> dict[str, Tensor | None]:
    try:
        grads = backward(outcome, dys)
        early = _copies(grads)
        subject.backend.synchronize()
    except Exception as error:
        raise subject.fail(f"the backward raised {type(error).__name__}: {error}", sample) from error
    _must_have_been_done(subject, sample, early, {f"the gradient of {name}": x for name, x in grads.items()})
    return grads


def _copies(values: Mapping[str, Any]) -> list[Tensor | None]:
    """Copies on the CPU, read as a model reads results: without synchronising the device."""
    return [x.detach().cpu().clone() if isinstance(x, Tensor) else None for x in values.values()]


def _must_have_been_done(
    subject: Subject, sample: Sample, early: Sequence[Tensor | None], values: Mapping[str, Any]
) -> None:
    """early: the values as they were read before the device was synchronised."""
    for (name, value), copy in zip(values.items(), early):
        if copy is not None and not equal_bits(copy, value):
            raise subject.fail(
                f"{name} was read before the work was done: it changed when the device was synchronised. Work must be "
                "ordered on the backend's current stream, where later operations of torch wait for it",
                sample,
            )


def _overwrite(arguments: Mapping[str, Any]) -> None:
    """Overwrites the storages of all tensors, as a model may do once a call has returned."""
    for _, _, x in tensors(arguments):
        if _strided(x) and x.numel():
            count = x.untyped_storage().nbytes() // x.element_size()
            x.detach().as_strided((count,), (1,), 0).fill_(float("nan") if x.is_floating_point() else 0)


def _compare(
    subject: Subject, sample: Sample, outcome: Outcome, oracle: Outcome, native: Outcome, note: str = ""
) -> float:
    """The largest error of all outputs and gradients, in tolerances. Raises Failure if one is too large."""
    worst = 0.0
    for name, y in outcome.outputs.items():
        worst = max(worst, _within(subject, sample, name + note, y, oracle.outputs[name], native.outputs[name]))
    for name, exact in oracle.gradients.items():
        got, label = outcome.gradients[name], f"the gradient of {name}{note}"
        exact = torch.zeros(outcome.leaves[name].shape, dtype=torch.float64) if exact is None else exact
        if got is None:
            if exact.any():
                raise subject.fail(f"{label} is missing (None)", sample)
            continue
        other = native.gradients[name]
        other = torch.zeros_like(got, device="cpu") if other is None else other
        worst = max(worst, _within(subject, sample, label, got, exact, other, gradient=True))
    return worst


def _within(
    subject: Subject, sample: Sample, name: str, y: Any, exact: Tensor, native: Tensor, gradient: bool = False
) -> float:
    _must_look_like(subject, sample, name, y, native)
    expected = Expected(exact, native, subject.tol, subject.dtype, gradient)
    error = expected.measure(y)
    if error.tolerances > subject.waiver:
        _must_not_be_late(subject, sample, name, y, error, lambda: expected.measure(y))
    subject.worst = max(subject.worst, error.tolerances)
    if error.tolerances > subject.waiver:
        own = expected.measure(native)
        rule = f" (allowed: {subject.waiver:g}; the reference in {subject.dtype} has {own.tolerances:.3g})"
        wrong = expected.errors(y) > subject.waiver
        observed = [] if gradient else list(hints.mistakes(subject.op, sample, subject.dtype, name, y))
        text = error.text + rule + hints.as_text([*observed, *hints.pattern(wrong, y, exact)])
        raise subject.fail(f"{name}: {text}", sample, error=error.tolerances)
    return error.tolerances


def _must_not_be_late(
    subject: Subject, sample: Sample, name: str, y: Tensor, error: Error, again: Callable[[], Error]
) -> None:
    """Fails if a wrong result changes within LATE_SECONDS: a thread that synchronize() does not wait for wrote it."""
    copy = y.detach().cpu().clone()
    time.sleep(LATE_SECONDS)
    if not equal_bits(copy, y) or again() != error:
        raise subject.fail(
            f"{name} was read before the work was done: it changed after synchronize() had returned. Work must be "
            "ordered on the backend's current stream, and synchronize() must wait for all of it",
            sample,
        )


def _must_look_like(subject: Subject, sample: Sample, name: str, y: Any, native: Tensor) -> None:
    if not isinstance(y, Tensor):
        raise subject.fail(f"{name} is {type(y).__name__}, not a tensor", sample)
    if y.shape != native.shape or y.dtype != native.dtype:
        raise subject.fail(
            f"{name} is {y.dtype} {tuple(y.shape)}; the reference gives {native.dtype} {tuple(native.shape)}", sample
        )
    if y.device.type != subject.device.type:
        raise subject.fail(f"{name} is on {y.device}, the arguments are on {subject.device}", sample)


def _must_not_alias(subject: Subject, sample: Sample, arguments: Mapping[str, Any], outcome: Outcome) -> None:
    results = outcome.result if isinstance(outcome.result, tuple) else (outcome.result,)
    for _, label, x in tensors(arguments):
        for y in results:
            same = isinstance(y, Tensor) and y.numel() and x.numel() and x.device == y.device
            if same and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                raise subject.fail(f"the output shares memory with the argument {label}; return a copy", sample)


def _must_be_untouched(subject: Subject, sample: Sample, before: _Memory) -> None:
    touched = before.changes()
    if touched:
        raise subject.fail(f"the call wrote to {', '.join(touched)}", sample)


class _Memory:
    """A copy of the storages of all arguments, to determine later what a call has written to."""

    def __init__(self, mutates: Sequence[str], arguments: Mapping[str, Any]) -> None:
        self.copies = [
            (label, x, name in mutates, _storage(x))
            for name, label, x in tensors(arguments)
            if x.numel() and _strided(x)
        ]

    def changes(self) -> list[str]:
        """Forbidden writes: to arguments that are not in `mutates`, and to gaps in the storages of those that are."""
        written = []
        for label, x, may_write, before in self.copies:
            after = _storage(x)
            if may_write:
                gaps = torch.ones(before.shape, dtype=torch.bool)
                gaps.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
                if not equal_bits(after[gaps], before[gaps]):
                    written.append(f"memory between the elements of {label}")
            elif not torch.equal(raw(after), raw(before)):
                written.append(label)
        return written


def _strided(x: Tensor) -> bool:
    return x.layout == torch.strided


def _storage(x: Tensor) -> Tensor:
    """A copy of x's entire storage, [elements] of x's dtype on the CPU."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return x.detach().as_strided((count,), (1,), 0).cpu().clone()
