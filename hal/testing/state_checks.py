"""What an implementation remembers between calls: results that it writes again, and values that are no longer true.

`check_state` makes a few calls in a row, as a model does, of one sample. Each call alone would be right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hal.core.dispatch import activated
from hal.core.op import Sample

from .calls import build, map_tensors, not_stored, run, tensors, to_double
from .checks import wrong_choices
from .comparison import Expected, equal_bits
from .reference import Reference
from .subject import Subject


def sample_for_state(subject: Subject, samples: Sequence[Sample]) -> Sample | None:
    """The first sample with at least two rows of two elements that the implementation accepts; None without one."""
    for sample in samples:
        if not sample.grad or not_stored(sample, subject.stored):
            continue
        arguments = build(subject.op, sample, subject.dtype, subject.device)
        first = next((x for _, _, x in tensors(arguments)), None)
        if first is None or first.ndim < 2 or min(first.shape) < 2:
            continue
        if not subject.impl.refusals(subject.op.Call(**arguments)):
            return sample
    return None


def check_state(subject: Subject, sample: Sample) -> None:
    """Checks calls that follow one another; to be used inside `with subject:`. Raises Failure.

    The results of a call must survive the next one; a call must see what an argument holds, although it had the same
    tensors before with other values; and a result may be the argument of the next call.
    """
    _results_must_survive(subject, sample)
    arguments = _build(subject, sample)
    _call(subject, sample, arguments)
    for _, label, x in tensors(arguments):
        if _halved(x) and x.numel():
            x.mul_(0.5)
            _must_be_right(
                subject,
                sample,
                arguments,
                f"is wrong after {label} was changed in place: the implementation keeps what it has computed from an "
                "earlier value. A cache must look at the contents (Tensor._version), not at the tensor",
            )
    _chained_calls_must_be_right(subject, sample)


def _results_must_survive(subject: Subject, sample: Sample) -> None:
    first = _call(subject, sample, _build(subject, sample))
    subject.backend.synchronize()
    before = {name: y.detach().cpu().clone() for name, y in first.items()}
    others = map_tensors(_build(subject, sample), lambda x: x.mul_(0.5) if _halved(x) else x)
    second = _call(subject, sample, others)
    subject.backend.synchronize()
    for name, y in first.items():
        if not equal_bits(before[name], y.cpu()):
            raise subject.fail(
                f"{name} changed when the op was called again with other values: the implementation writes its results "
                "to memory of an earlier call that is still in use",
                sample,
                check="state",
            )
    del second


def _chained_calls_must_be_right(subject: Subject, sample: Sample) -> None:
    arguments = _build(subject, sample)
    name, _, x = next(tensors(arguments))
    if not isinstance(arguments[name], Tensor):
        return
    results = _call(subject, sample, arguments)
    for label, y in results.items():
        if name not in subject.op.mutates and y.shape == x.shape and y.dtype == x.dtype:
            # As a view, like the tensors that a model passes on, which are other objects with the same memory.
            chained = {**arguments, name: y.detach()}
            _must_be_right(
                subject, sample, chained, f"is wrong if {name} is {label} of the call before (a chained call)"
            )


def _halved(x: Tensor) -> bool:
    """Whether the checks change x. float8 has no arithmetic."""
    return x.is_floating_point() and x.dtype.itemsize > 1


def _build(subject: Subject, sample: Sample) -> dict[str, Any]:
    return build(subject.op, sample, subject.dtype, subject.device)


def _call(subject: Subject, sample: Sample, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The results of the call, without autograd."""
    try:
        return run(subject.op, subject.op, arguments, False).outputs
    except Exception as error:
        raise subject.fail(f"a repeated call raised {type(error).__name__}: {error}", sample, check="state") from error


def _must_be_right(subject: Subject, sample: Sample, arguments: Mapping[str, Any], what: str) -> None:
    op = subject.op
    # Copied before the call, which may write in place.
    wide, native = to_double(arguments), map_tensors(arguments, lambda x: x.detach().cpu().clone())
    results = _call(subject, sample, arguments)
    subject.backend.synchronize()
    if op.choice is not None and arguments[op.choice.parameter] is None:
        name = f"output {op.choice.output}"
        chosen = results[name].detach().cpu()
        with activated(Reference()):
            wrong = wrong_choices(op, op.choice, wide, chosen)
        if wrong.numel():
            raise subject.fail(
                f"{name} {what}: row {int(wrong[0])} is not the reference's choice", sample, check="state"
            )
        # The other results are compared with those of the reference for the same choice.
        wide[op.choice.parameter] = native[op.choice.parameter] = chosen
    with activated(Reference()):
        exact = run(op, op.reference, wide, False).outputs
        rounded = run(op, op.reference, native, False).outputs
    for name, y in results.items():
        error = Expected(exact[name], rounded[name], subject.tol, subject.dtype).measure(y)
        if error.tolerances > subject.waiver:
            raise subject.fail(f"{name} {what}: {error.text}", sample, error=error.tolerances, check="state")
