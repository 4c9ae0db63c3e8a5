"""Products with their communication, between processes: the implementations that need a backend's own communicator.

`sharded.py` checks such ops between threads, whose communicator a device's fused operators refuse. Here every rank of
a real group calls each implementation with its shards, and compares its own part of the result and of the gradients
with the reference of one rank in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal.comm.contract import Comm
from hal.core.backend import Impl
from hal.core.op import Sample, TensorSpec

from .calls import backward, build, run
from .checks import references
from .comparison import Expected
from .sharded import SHARDED
from .subject import Subject

OPS = ("all_gather_linear", "linear_reduce_scatter")
WIDTH = 256
"""The number of products that are summed: Ascend's operators take no fewer."""


def samples(name: str, ranks: int) -> list[Sample]:
    """Calls of one rank, whose shards fused operators accept."""
    scale = WIDTH**-0.5
    if name == "all_gather_linear":
        weight = TensorSpec((3 * ranks, WIDTH), scale=scale)
        bias = TensorSpec((3 * ranks,), scale=0.5)
        return [
            Sample((TensorSpec((2 * ranks, 3, WIDTH)), weight, bias)),
            Sample((TensorSpec((5 * ranks, WIDTH), strided="rows"), weight), {"return_gathered": True}),
        ]
    weight = TensorSpec((WIDTH, WIDTH * ranks), scale=scale / ranks)
    return [Sample((TensorSpec((rows * ranks, 2, WIDTH * ranks)), weight)) for rows in (1, 3)]


def check_sharded_ops(comm: Comm, device: torch.device) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Runs every implementation of the ops on this rank; (op, implementation, dtype) -> {samples, worst, reasons,
    problems}. All ranks of the group must call it."""
    backend, results = hal.backend(), {}
    for name in OPS:
        op = hal.OPS[name]
        for impl in backend.implementations(op):
            for dtype in op.tol:
                row: dict[str, Any] = {"samples": 0, "worst": 0.0, "reasons": [], "problems": []}
                for sample in samples(name, comm.size):
                    _check(impl, sample, dtype, comm, device, row)
                results[name, impl.id, str(dtype).removeprefix("torch.")] = row
    return results


def _check(
    impl: Impl, sample: Sample, dtype: torch.dtype, comm: Comm, device: torch.device, row: dict[str, Any]
) -> None:
    """One call of one implementation on this rank; adds to `row`."""
    op, split, rank, ranks = impl.op, SHARDED[impl.op.name], comm.rank, comm.size
    subject = Subject(hal.backend(), impl, dtype)
    oracle, native, dys = references(subject, sample)

    def own(x: Tensor, dim: int | None) -> Tensor:
        return x if dim is None else x.chunk(ranks, dim)[rank]

    given = build(op, sample, dtype)
    tensors = {n: own(x, split.parameters.get(n)).to(device) for n, x in given.items() if isinstance(x, Tensor)}
    arguments = {**given, **tensors, "comm": comm}
    reasons = impl.refusals(op.Call(**arguments))
    if reasons:
        row["reasons"] = list(dict.fromkeys([*row["reasons"], *reasons]))
        return
    with subject:
        outcome = run(op, op, arguments, with_grad=True)
        outcome.gradients = backward(outcome, [own(dys[0], split.result).to(device)])
    row["samples"] += 1

    def compare(label: str, y: Tensor | None, exact: Tensor, other: Tensor, gradient: bool) -> None:
        if y is None or y.shape != other.shape or y.dtype != other.dtype:
            found = "missing" if y is None else f"{y.dtype} {tuple(y.shape)}"
            row["problems"].append(f"{sample}: {label} is {found}, not {other.dtype} {tuple(other.shape)}")
            return
        error = Expected(exact, other, op.tol[dtype], dtype, gradient).measure(y)
        row["worst"] = max(row["worst"], error.tolerances)
        if error.tolerances > subject.waiver:
            row["problems"].append(f"{sample}: {label}: {error.text}")

    for label, y in outcome.outputs.items():
        exact, other = (split.result_of(label, o.outputs[label], rank, ranks) for o in (oracle, native))
        compare(label, y, exact, other, False)
    for n, gradient in outcome.gradients.items():
        exact_gradient, other_gradient = oracle.gradients[n], native.gradients[n]
        assert exact_gradient is not None and other_gradient is not None
        dim = split.parameters[n]
        compare(f"the gradient of {n}", gradient, own(exact_gradient, dim), own(other_gradient, dim), True)
