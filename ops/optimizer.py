"""Ops of the optimizer step, each over a list of tensors in one call: adamw, l2norm, unscale_and_check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hal
from hal import Call, Sample, TensorSpec, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def _check_adamw(call: Call) -> None:
    params, exp_avgs, exp_avg_sqs, step = call.params, call.exp_avgs, call.exp_avg_sqs, call.step
    lists = {"grads": call.grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if call.model_params is not None:
        lists["model_params"] = call.model_params
    shapes = [p.shape for p in params]
    for name, tensors in lists.items():
        require(len(tensors) == len(shapes), "adamw", f"{len(shapes)} {name}, one per param", len(tensors))
        # One comparison: a message per tensor, formatted whether it is needed or not, would cost more than the kernel.
        if shapes != [t.shape for t in tensors]:
            shape, other = next((s, t.shape) for s, t in zip(shapes, tensors) if s != t.shape)
            require(False, "adamw", f"{name} shaped like params ({tuple(shape)})", tuple(other))
    if {t.dtype for tensors in (params, exp_avgs, exp_avg_sqs) for t in tensors} - {torch.float32}:
        triples = (tuple(t.dtype for t in triple) for triple in zip(params, exp_avgs, exp_avg_sqs))
        dtypes = next(triple for triple in triples if set(triple) != {torch.float32})
        require(False, "adamw", "float32 params, exp_avgs and exp_avg_sqs", dtypes)
    integer = isinstance(step, (int, torch.SymInt))
    require(integer and step >= 1, "adamw", "step, the number of this step, counted from 1", step)
    require(0 <= call.beta1 < 1 and 0 <= call.beta2 < 1, "adamw", "beta1 and beta2 in [0, 1)", (call.beta1, call.beta2))
    require(call.eps >= 0 and call.lr >= 0, "adamw", "eps >= 0 and lr >= 0", (call.eps, call.lr))
    factor = call.clip_factor
    if factor is not None:
        scalar = factor.dtype == torch.float32 and factor.ndim == 0
        require(scalar, "adamw", "a float32 scalar as clip_factor", (factor.dtype, tuple(factor.shape)))


def _adamw_call(shapes: list[tuple[int, ...]], model: torch.dtype | None = None, **kw: Any) -> Sample:
    def tensors(**how: Any) -> list[TensorSpec]:
        return [TensorSpec(shape, **how) for shape in shapes]

    squares = [TensorSpec(shape, "int", low=0, high=3, dtype=torch.float32) for shape in shapes]
    if model is not None:
        kw["model_params"] = tensors(dtype=model)
    return Sample((tensors(), tensors(dtype=model), tensors(), squares), {"step": 1, "lr": 0.01, **kw})


def _edge_cases_adamw() -> list[Sample]:
    return [
        _adamw_call([(3, 4), (7,), ()]),
        _adamw_call([(0,), (5,)], step=10, beta1=0.9, beta2=0.95),
        _adamw_call([(33,)], step=1000, weight_decay=0.1, eps=1e-5),
        _adamw_call([(4, 9), (1,)], model=torch.bfloat16, grad_scale=0.25, weight_decay=0.01),
        _adamw_call([(130, 3)], lr=0.0),
        _adamw_call([], step=2),
        *(_adamw_call([(5, 3), (70,)], clip_factor=_factor(value)) for value in (0.0, 0.3, math.inf, math.nan)),
        _adamw_call([(4, 9)], model=torch.bfloat16, grad_scale=0.5, clip_factor=_factor(0.125)),
        _adamw_call([(4, 9)], model=torch.bfloat16, weight_decay=0.1, clip_factor=_factor(math.nan)),
    ]


def _factor(value: float) -> TensorSpec:
    return TensorSpec((), "values", values=(value,), dtype=torch.float32)


def _samples_adamw() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        shapes = draw(st.lists(st.lists(st.integers(1, 20), max_size=2).map(tuple), min_size=1, max_size=4))
        return _adamw_call(
            shapes,
            draw(st.sampled_from([None, torch.bfloat16])),
            step=draw(st.integers(1, 2000)),
            lr=draw(st.sampled_from([1e-4, 1e-2])),
            beta1=draw(st.sampled_from([0.0, 0.9])),
            beta2=draw(st.sampled_from([0.95, 0.999])),
            weight_decay=draw(st.sampled_from([0.0, 0.1])),
            grad_scale=draw(st.sampled_from([1.0, 0.5])),
            clip_factor=draw(st.sampled_from([None, _factor(0.7), _factor(math.nan)])),
        )

    return call()


@hal.op(
    check=_check_adamw,
    tol={torch.float32: Tol(1e-6, 4e-6)},  # a dozen float32 operations per element; model_params: see kit
    samples=_samples_adamw,
    edge_cases=_edge_cases_adamw,
    mutates=("params", "exp_avgs", "exp_avg_sqs", "model_params"),
)
def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    model_params: Sequence[Tensor] | None = None,
    clip_factor: Tensor | None = None,
) -> None:
    """One AdamW step, in place, on lists of tensors (any shapes; float32 params and moments).

    step: this step's number, from 1 (the bias correction is 1 - beta**step). weight_decay is decoupled: p *= 1 - lr *
    weight_decay, before the update. grads (any float dtype) are multiplied by grad_scale on the fly, which folds
    gradient clipping in. model_params: low-precision copies that receive the new params in the same pass.
    clip_factor: a further factor of grads, a float32 scalar on their device, so that the host need not read the norm
        from which it is computed. If it is not finite, nothing is written.

    Source: Loshchilov, Hutter, "Decoupled weight decay regularization", arXiv 1711.05101, algorithm 2.
    """
    if clip_factor is not None:
        written = [*params, *exp_avgs, *exp_avg_sqs, *(model_params or ())]
        before = [t.clone() for t in written]
        grads = [g.to(p.dtype) * clip_factor for p, g in zip(params, grads)]
    correction1, correction2 = 1.0 - beta1**step, 1.0 - beta2**step
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs):
        g = g.to(p.dtype) * grad_scale
        p.mul_(1.0 - lr * weight_decay)
        m.mul_(beta1).add_(g, alpha=1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        p.sub_(lr / correction1 * m / ((v / correction2).sqrt() + eps))
    for p, copy in zip(params, model_params or ()):
        copy.copy_(p)
    if clip_factor is not None:
        for after, old in zip(written, before):
            after.copy_(torch.where(torch.isfinite(clip_factor), after, old))


def _require_floating(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    require(all(t.is_floating_point() for t in tensors), op, f"floating-point {name}", [t.dtype for t in tensors])


def _check_l2norm(call: Call) -> None:
    _require_floating("l2norm", "tensors", call.tensors)
    require(
        len({t.device for t in call.tensors}) <= 1, "l2norm", "tensors of one device", [t.device for t in call.tensors]
    )


def _lists(*shapes: tuple[int, ...], **how: Any) -> list[TensorSpec]:
    return [TensorSpec(shape, **how) for shape in shapes]


def _edge_cases_lists() -> list[list[TensorSpec]]:
    return [
        _lists((3, 4), (7,), ()),
        _lists((0,), (5,)),
        _lists((1000,), (33, 3)),
        _lists((4, 6), strided="last"),
        _lists((8,), scale=0.0),
        [TensorSpec((3,), "values", values=(1.0, float("inf"), 2.0))],
        [TensorSpec((5,)), TensorSpec((2,), "values", values=(float("nan"), 0.0))],
    ]


def _samples_lists() -> SearchStrategy[list[TensorSpec]]:
    from hypothesis import strategies as st

    shapes = st.lists(st.integers(0, 40), max_size=2).map(tuple)
    strided = st.sampled_from(["", "rows", "last"])
    return st.lists(st.builds(lambda s, k: TensorSpec(s, strided=k), shapes, strided), min_size=1, max_size=4)


@hal.op(
    check=_check_l2norm,
    tol={
        torch.float32: Tol(1e-6, 4e-6),  # a sum of up to ~1600 squares, in an order that differs between backends
        torch.bfloat16: Tol(1e-6, 4e-6),  # inputs are exact, the result is float32
        torch.float16: Tol(1e-6, 4e-6),
    },
    samples=lambda: _samples_lists().map(lambda tensors: Sample((tensors,))),
    edge_cases=lambda: [Sample((tensors,)) for tensors in _edge_cases_lists()],
)
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    """sqrt of the sum of squares over all elements of all tensors; float32 scalar on their device (0 for none)."""
    if not tensors:
        return torch.zeros((), device=hal.device())
    acc = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch.cat([part for t in tensors for part in _norms_of_rows(t.to(acc).reshape(-1))])
    while norms.numel() > _ROW:
        norms = torch.cat(_norms_of_rows(norms))
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


_ROW = 1024
"""Elements whose squares are added in one sum. torch's CPU, for one, adds squares one after the other in float32,
and is wrong by 1e-5 for a million elements and by 1 % for a hundred million.
"""


def _norms_of_rows(flat: Tensor) -> list[Tensor]:
    """The norms of `flat`'s rows of _ROW elements, and the elements that are left."""
    whole = flat.numel() // _ROW * _ROW
    return [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=-1), flat[whole:]] if whole else [flat]


def _check_unscale(call: Call) -> None:
    _require_floating("unscale_and_check", "grads", call.grads)
    require(math.isfinite(call.inv_scale), "unscale_and_check", "a finite inv_scale", call.inv_scale)


@hal.op(
    check=_check_unscale,
    tol={
        torch.float32: Tol(0.0, 1.2e-7),  # one product
        torch.bfloat16: Tol(0.0, 7.9e-3),
        torch.float16: Tol(6e-8, 9.8e-4),
    },
    samples=lambda: _samples_lists().map(lambda tensors: Sample((tensors, 0.37))),
    edge_cases=lambda: [Sample((tensors, 2.0**-16)) for tensors in _edge_cases_lists()],
    mutates=("grads",),
)
def unscale_and_check(grads: Sequence[Tensor], inv_scale: float) -> Tensor:
    """grads *= inv_scale, in place; returns a float32 scalar, 1.0 if any scaled element is inf or NaN, else 0.0.

    The check is on the products in the grads' dtype, so an overflow of the multiplication is found too.
    """
    for g in grads:
        g.mul_(inv_scale)
    bad = [(~torch.isfinite(g)).any() for g in grads]
    if not bad:
        return torch.zeros((), device=hal.device())
    return torch.stack(bad).any().to(torch.float32)
