"""Ops on a vocabulary that may be sharded across a Comm: embedding and cross_entropy.

A rank holds the ids [vocab_start, vocab_start + v_local). Ranks exchange one to three numbers per token, never logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hal
from hal import Call, Comm, Sample, TensorSpec, Tol, require

from .mappings import reduce_from_region

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def require_ids(op: str, name: str, ids: Tensor, vocab_start: int, comm: Comm | None) -> None:
    """ids [...] of any shape."""
    require(ids.dtype == torch.int64, op, f"int64 {name}", ids.dtype)
    require(vocab_start >= 0, op, "vocab_start >= 0", vocab_start)
    sharded = comm is not None and comm.size > 1
    require(vocab_start == 0 or sharded, op, "a comm with several ranks, because vocab_start > 0", comm)


def _check_embedding(call: Call) -> None:
    require(call.weight.ndim == 2, "embedding", "weight of shape [v_local, h]", tuple(call.weight.shape))
    rows = call.weight.shape[0]
    require(rows > 0 or not call.ids.numel(), "embedding", "a weight with rows, because there are ids", rows)
    require_ids("embedding", "ids", call.ids, call.vocab_start, call.comm)


def _edge_cases_embedding() -> list[Sample]:
    return [
        Sample((TensorSpec((11, 6)), TensorSpec((4, 5), "int", high=11, dtype=torch.int64))),
        Sample((TensorSpec((3, 7)), TensorSpec((50,), "int", high=3, dtype=torch.int64))),  # every id many times
        Sample((TensorSpec((3, 7)), TensorSpec((0,), "int", high=3, dtype=torch.int64))),
        Sample((TensorSpec((1, 1)), TensorSpec((), "int", high=1, dtype=torch.int64))),
        Sample((TensorSpec((9, 5), strided="rows"), TensorSpec((2, 3, 2), "int", high=9, dtype=torch.int64))),
    ]


def _samples_embedding() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        lambda v, h, shape: Sample((TensorSpec((v, h)), TensorSpec(tuple(shape), "int", high=v, dtype=torch.int64))),
        st.integers(1, 40),
        st.integers(1, 33),
        st.lists(st.integers(1, 8), max_size=3),
    )


@hal.op(
    check=_check_embedding,
    tol={  # the forward copies; the gradient sums up to ~50 rows
        torch.float32: Tol(1e-5, 1e-6),
        torch.bfloat16: Tol(6.3e-2, 1.6e-2),
        torch.float16: Tol(8e-3, 2e-3),
    },
    samples=_samples_embedding,
    edge_cases=_edge_cases_embedding,
    grads=("weight",),
)
def embedding(weight: Tensor, ids: Tensor, *, vocab_start: int = 0, comm: Comm | None = None) -> Tensor:
    """Rows of the table: weight [v_local, h], ids [...] int64 (global) -> [..., h].

    With `comm`, the table's rows are sharded over its ranks and every rank gets the full result. ids outside the whole
    vocabulary are undefined (a row of zeros when sharded, an error where the device checks).
    """
    if comm is None or comm.size == 1:
        return torch.nn.functional.embedding(ids, weight)
    local = ids - vocab_start
    absent = (local < 0) | (local >= weight.shape[0])
    rows = torch.nn.functional.embedding(local.masked_fill(absent, 0), weight)
    return reduce_from_region(rows.masked_fill(absent[..., None], 0.0), comm)


def _check_cross_entropy(call: Call) -> None:
    logits, target, label_smoothing = call.logits, call.target, call.label_smoothing
    op = "cross_entropy"
    require(logits.ndim >= 1 and logits.shape[-1] > 0, op, "logits of shape [..., v], v > 0", tuple(logits.shape))
    require(target.shape == logits.shape[:-1], op, f"target of shape {tuple(logits.shape[:-1])}", tuple(target.shape))
    require(0.0 <= label_smoothing < 1.0, op, "label_smoothing in [0, 1)", label_smoothing)
    require(label_smoothing == 0.0 or logits.shape[-1] > 1, op, "at least two classes to smooth over", logits.shape[-1])
    require_ids(op, "target", target, call.vocab_start, call.comm)


def _edge_cases_cross_entropy() -> list[Sample]:
    def target(shape: tuple[int, ...], v: int) -> TensorSpec:
        return TensorSpec(shape, "int", high=v, dtype=torch.int64)

    return [
        Sample((TensorSpec((4, 11)), target((4,), 11))),
        Sample((TensorSpec((2, 3, 50)), target((2, 3), 50)), {"label_smoothing": 0.1}),
        Sample((TensorSpec((1, 1)), target((1,), 1))),
        Sample((TensorSpec((0, 7)), target((0,), 7))),
        Sample((TensorSpec((9,)), target((), 9))),
        Sample((TensorSpec((3, 1031)), target((3,), 1031))),
        Sample((TensorSpec((3, 40), strided="last"), target((3,), 40))),
        Sample((TensorSpec((3, 40), strided="rows"), target((3,), 40)), {"label_smoothing": 0.3}),
        Sample((TensorSpec((3, 17), scale=1000.0), target((3,), 17))),  # Megatron's test scale; exp must not overflow
        # Large logits: log-sum-exp is 10001.4, of which float32 keeps too few digits to subtract the target's logit.
        Sample(
            (
                TensorSpec((1, 3), "values", values=(10000.0, 10001.0, 9999.0)),
                TensorSpec((1,), "values", values=(1,), dtype=torch.int64),
            )
        ),
        Sample((TensorSpec((1, 3), "values", values=(float("nan"), 1.0, 2.0)), target((1,), 3)), grad=False),
        Sample(
            (
                TensorSpec((1, 3), "values", values=(-float("inf"), 1.0, 2.0)),
                TensorSpec((1,), "values", values=(1,), dtype=torch.int64),
            )
        ),
    ]


def _samples_cross_entropy() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        lead, v = tuple(draw(st.lists(st.integers(1, 6), max_size=2))), draw(st.integers(2, 200))
        logits = TensorSpec(
            (*lead, v), strided=draw(st.sampled_from(["", "rows"])), scale=draw(st.sampled_from([1.0, 20.0]))
        )
        return Sample(
            (logits, TensorSpec(lead, "int", high=v, dtype=torch.int64)),
            {"label_smoothing": draw(st.sampled_from([0.0, 0.1]))},
        )

    return call()


@hal.op(
    check=_check_cross_entropy,
    tol={
        torch.float32: Tol(1e-5, 1e-5),  # log-sum-exp of numbers up to ~50, cancelled against one of them
        torch.bfloat16: Tol(1e-3, 1.6e-2),  # the loss is float32; the gradient is rounded to 8 bits
        torch.float16: Tol(1e-3, 2e-3),
    },
    samples=_samples_cross_entropy,
    edge_cases=_edge_cases_cross_entropy,
    grads=("logits",),
    hints=("inplace_backward",),
)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    vocab_start: int = 0,
    comm: Comm | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """-log softmax(logits)[target] per token, float32 [...]. logits [..., v_local], target [...] int64 (global ids).

    With `comm`, the vocabulary (v classes in all) is sharded over its ranks; every rank gets the loss of every token.
    label_smoothing e (as in Megatron-LM): with e' = e * v / (v - 1), loss = (1 - e') * nll - e' * mean(log softmax).
    A target outside the vocabulary is undefined.

    inplace_backward (as flash-attn names it): the caller needs logits no more, so a backend may write their gradient
    over them instead of into a second buffer of their size. torch then refuses a second backward pass.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sharded = comm is not None and comm.size > 1
    top = z.detach().amax(-1)
    if sharded:
        assert comm is not None
        top = comm.all_reduce(top, "max")
    z = z - top[..., None]
    local = target - vocab_start
    absent = (local < 0) | (local >= z.shape[-1])
    at_target = z.gather(-1, local.masked_fill(absent, 0)[..., None]).squeeze(-1).masked_fill(absent, 0.0)
    per_token = torch.stack((z.exp().sum(-1), at_target))
    if label_smoothing:
        per_token = torch.cat((per_token, z.sum(-1)[None]))
    per_token = reduce_from_region(per_token, comm)
    lse = per_token[0].log()
    loss = lse - per_token[1]
    if label_smoothing:
        v = z.shape[-1] * (comm.size if comm is not None else 1)
        smoothing = label_smoothing * v / (v - 1)
        loss = (1.0 - smoothing) * loss - smoothing * (per_token[2] / v - lse)
    return loss
