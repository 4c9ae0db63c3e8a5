"""Ops on a sharded vocabulary: ranks are threads, the oracle is the same call unsharded, in float64.

The parameter named in `SHARDED` is split into equal shards along one dimension; rank r calls with its shard, its
`vocab_start` and a communicator. Every rank must return the unsharded result, and the concatenation of the ranks'
gradients must be the unsharded gradient. The gradient of the parameter named in `PARTIAL` is the sum of the ranks'.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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

SHARDED = {"embedding": ("weight", 0), "cross_entropy": ("logits", -1), "linear_cross_entropy": ("weight", 0)}
"""op name -> (the parameter that is sharded, along which dimension)."""

PARTIAL = {"linear_cross_entropy": "x"}
"""op name -> the parameter of whose gradient each rank returns a partial sum."""

TIMEOUT = 20.0


def sharded_samples(name: str, ranks: int) -> list[Sample]:
    """Unsharded calls whose vocabulary size is divisible by `ranks`."""
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
    return []


def check_sharded(subject: Subject, sample: Sample, ranks: int) -> Verdict:
    """Checks one call on `ranks` ranks; inside `with subject:`. Raises Failure."""
    op = subject.op
    name, dim = SHARDED[op.name]
    oracle, native, dys = references(subject, sample)
    whole = build(op, sample, subject.dtype, subject.device)
    parts = whole[name].chunk(ranks, dim)
    size = parts[0].shape[dim]
    comms = threads(ranks, timeout=TIMEOUT)

    def arguments(rank: int, comm: Comm) -> dict[str, Any]:
        return {**whole, name: parts[rank].clone(), "vocab_start": rank * size, "comm": comm}

    declined = subject.impl.refusals(op.Call(**arguments(0, comms[0])))
    if declined:
        return Verdict(declined, 0.0)

    def work(rank: int) -> Outcome:
        outcome = run(op, op, arguments(rank, comms[rank]), with_grad=True)
        outcome.gradients = backward(outcome, [dy.to(subject.device) for dy in dys])
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
            compare(f"{label} of rank {rank}", y, oracle.outputs[label], native.outputs[label])
    grads = [o.gradients[name] for o in outcomes]
    exact, other = oracle.gradients[name], native.gradients[name]
    if any(g is None for g in grads) or exact is None or other is None:
        raise fail(f"the gradient of {name} is missing (None)")
    compare(f"the gradient of {name}", torch.cat([g for g in grads if g is not None], dim), exact, other, True)
    if op.name in PARTIAL:
        name = PARTIAL[op.name]
        terms = [o.gradients[name] for o in outcomes]
        exact, other = oracle.gradients[name], native.gradients[name]
        if any(t is None for t in terms) or exact is None or other is None:
            raise fail(f"the gradient of {name} is missing (None)")
        # Added in float64, so that the sum is not rounded a second time.
        total = torch.stack([t.double() for t in terms if t is not None]).sum(0).to(other.dtype)
        compare(f"the sum of the ranks' gradients of {name}", total, exact, other, True)
    subject.worst = max(subject.worst, worst)
    return Verdict((), worst)
