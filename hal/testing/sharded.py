"""Ops with a communicator: ranks are threads, the oracle is the same call of one rank, in float64.

The parameters named in `SHARDED` are split into equal shards along one dimension each; rank r calls with its shards and
a communicator (ops on a vocabulary also with their `vocab_start`). Every rank must return its part of the result of one
rank, and the concatenation of the ranks' gradients must be the gradient of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.comm.contract import Comm
from hal.comm.threads import threads
from hal.core.op import Sample, TensorSpec

from .calls import Outcome, backward, build, run
from .checks import Verdict, references
from .comparison import Expected
from .subject import Subject


@dataclass(frozen=True)
class Split:
    """How the arguments and the result of an op are divided over ranks.

    parameters: name -> the dimension along which it is split. result: the dimension of the (first) result that is
    split; None: every rank returns the whole. partial: the parameter of whose gradient each rank returns a summand.
    communicates_back: the backward pass communicates. autograd has one thread for all of a device's backward passes, in
    which ranks that are threads would wait for each other, so such ops are checked between processes there
    (sharded_processes.py); so are their implementations that need the backend's own communicator.
    """

    parameters: Mapping[str, int]
    result: int | None = None
    partial: str | None = None
    communicates_back: bool = False

    def result_of(self, label: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """What rank `rank` returns of the output `label`, whose value on one rank is `whole`."""
        if self.result is None or label not in ("the output", "output 0"):
            return whole
        return whole.chunk(ranks, self.result)[rank]


SHARDED = {
    "embedding": Split({"weight": 0}),
    "cross_entropy": Split({"logits": -1}),
    "linear_cross_entropy": Split({"weight": 0}, partial="x"),
    "all_gather_linear": Split({"x": 0, "weight": 0, "bias": 0}, result=-1, communicates_back=True),
    "linear_reduce_scatter": Split({"x": -1, "weight": 1}, result=0, communicates_back=True),
}
"""op name -> how it is divided over ranks."""

TIMEOUT = 20.0


def sharded_samples(name: str, ranks: int) -> list[Sample]:
    """Calls of one rank whose sharded sizes are divisible by `ranks`."""
    if name == "embedding":
        v = 4 * ranks
        return [
            Sample((TensorSpec((v, 6)), TensorSpec(shape, "int", high=v, dtype=torch.int64)))
            for shape in ((3, 5), (40,), (0,))
        ]
    if name == "cross_entropy":
        v = 7 * ranks
        target = TensorSpec((3, 4), "int", high=v, dtype=torch.int64)
        return [
            Sample((TensorSpec((3, 4, v), scale=scale), target), {"label_smoothing": smoothing})
            for scale, smoothing in ((1.0, 0.0), (1.0, 0.1), (300.0, 0.0))
        ]
    if name == "linear_cross_entropy":
        v = 7 * ranks
        weight, target = TensorSpec((v, 8), scale=0.35), TensorSpec((3, 4), "int", high=v, dtype=torch.int64)
        return [
            Sample((TensorSpec((3, 4, 8)), weight, target), {"label_smoothing": smoothing}) for smoothing in (0.0, 0.1)
        ]
    if name == "all_gather_linear":
        weight, bias = TensorSpec((5 * ranks, 16), scale=0.25), TensorSpec((5 * ranks,), scale=0.5)
        return [
            Sample((TensorSpec((3 * ranks, 2, 16)), weight, bias)),
            Sample((TensorSpec((4 * ranks, 16), strided="rows"), weight), {"return_gathered": True}),
        ]
    if name == "linear_reduce_scatter":
        n_in = 8 * ranks
        weight = TensorSpec((6, n_in), scale=n_in**-0.5)
        return [Sample((TensorSpec((lead * ranks, 2, n_in)), weight)) for lead in (1, 3)]
    return []


def check_sharded(subject: Subject, sample: Sample, ranks: int) -> Verdict:
    """Checks one call on `ranks` ranks; inside `with subject:`. Raises Failure."""
    op = subject.op
    split = SHARDED[op.name]
    oracle, native, dys = references(subject, sample)
    whole = build(op, sample, subject.dtype, subject.device)
    shards = {n: whole[n].chunk(ranks, dim) for n, dim in split.parameters.items() if whole[n] is not None}
    comms = threads(ranks, timeout=TIMEOUT)

    def arguments(rank: int, comm: Comm) -> dict[str, Any]:
        own = {**whole, **{n: parts[rank].clone() for n, parts in shards.items()}, "comm": comm}
        if "vocab_start" in own:
            (n, dim), *_ = split.parameters.items()
            own["vocab_start"] = rank * shards[n][0].shape[dim]
        return own

    declined = subject.impl.refusals(op.Call(**arguments(0, comms[0])))
    if declined:
        return Verdict(declined, 0.0)

    def work(rank: int) -> Outcome:
        outcome = run(op, op, arguments(rank, comms[rank]), with_grad=True)
        first, *others = (dy.to(subject.device) for dy in dys)
        own = first if split.result is None else first.chunk(ranks, split.result)[rank].clone()
        outcome.gradients = backward(outcome, [own, *others])
        return outcome

    def fail(message: str, error: float = float("inf")) -> Exception:
        return subject.fail(f"sharded over {ranks} ranks: {message}", sample, error=error, ranks=ranks)

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(work, rank) for rank in range(ranks)]
        errors = [f.exception() for f in futures]
    raised = next((e for e in errors if e is not None), None)
    if raised is not None:
        raise fail(f"accepted the call and raised {type(raised).__name__}: {raised}") from raised
    outcomes = [f.result() for f in futures]
    worst = 0.0

    def compare(label: str, y: Tensor, exact: Tensor, other: Tensor, gradient: bool = False) -> None:
        nonlocal worst
        if y.shape != other.shape or y.dtype != other.dtype:
            raise fail(f"{label} is {y.dtype} {tuple(y.shape)}, not {other.dtype} {tuple(other.shape)}")
        error = Expected(exact, other, subject.tol, subject.dtype, gradient).measure(y)
        worst = max(worst, error.tolerances)
        if error.tolerances > subject.waiver:
            raise fail(f"{label}: {error.text}", error.tolerances)

    for rank, outcome in enumerate(outcomes):
        for label, y in outcome.outputs.items():
            exact, other = (split.result_of(label, r.outputs[label], rank, ranks) for r in (oracle, native))
            compare(f"{label} of rank {rank}", y, exact, other)
    for name in shards:
        exact, other, grads = _gradients(name, oracle, native, outcomes, fail)
        compare(f"the gradient of {name}", torch.cat(grads, split.parameters[name]), exact, other, True)
    if split.partial is not None:
        exact, other, grads = _gradients(split.partial, oracle, native, outcomes, fail)
        # Added in float64, so that the sum is not rounded a second time.
        total = torch.stack([g.double() for g in grads]).sum(0).to(other.dtype)
        compare(f"the sum of the ranks' gradients of {split.partial}", total, exact, other, True)
    subject.worst = max(subject.worst, worst)
    return Verdict((), worst)


def _gradients(
    name: str, oracle: Outcome, native: Outcome, outcomes: Sequence[Outcome], fail: Callable[[str], Exception]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of `name`: of the oracle, of the reference in the dtype under test, and of every rank."""
    exact, other = oracle.gradients[name], native.gradients[name]
    grads = [g for g in (outcome.gradients[name] for outcome in outcomes) if g is not None]
    if len(grads) != len(outcomes) or exact is None or other is None:
        raise fail(f"the gradient of {name} is missing (None)")
    return exact, other, grads
