"""adamw, l2norm and unscale_and_check (kernels/optimizer.cl): one launch per tensor, one wait per list."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import ops

from .device import OpenCL
from .engine import CHUNK
from .memory import Call, Out
from .tensors import reasons


def _why_not_adamw(
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
) -> Sequence[str]:
    written = [*params, *exp_avgs, *exp_avg_sqs, *(model_params or ())]
    if not all(t.is_contiguous() for t in written):
        return ["a parameter, moment or model copy that is not contiguous (it is updated in place)"]
    return reasons(*written, *grads)


@OpenCL.impl(ops.adamw, id="opencl/cl", why_not=_why_not_adamw)
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
) -> None:
    correction1, correction2 = 1.0 - beta1**step, 1.0 - beta2**step
    rates = (1.0 - lr * weight_decay, lr / correction1, beta1, 1.0 - beta1, beta2, 1.0 - beta2, correction2, eps)
    scalars = tuple(float(s) for s in (*rates, grad_scale))
    with Call() as call:
        for i, (p, g, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs)):
            if not p.numel():
                continue
            copy = None if model_params is None else model_params[i]
            call.run(
                *("optimizer", "adamw", {"T": g.dtype, "R": p.dtype if copy is None else copy.dtype}, _grid(p)),
                *(Out(p, update=True), g.contiguous(), Out(m, update=True), Out(v, update=True)),
                *(None if copy is None else Out(copy), *scalars, p.numel()),
            )


def _grid(t: Tensor) -> tuple[int]:
    return (-(-t.numel() // CHUNK),)


def _why_not_l2norm(tensors: Sequence[Tensor]) -> Sequence[str]:
    return reasons(*tensors)


@OpenCL.impl(ops.l2norm, id="opencl/cl", why_not=_why_not_l2norm)
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    dense = [t.contiguous() for t in tensors if t.numel()]
    norm, chunks = torch.zeros(()), [_grid(t)[0] for t in dense]
    if not dense:
        return norm
    with Call() as call:
        partial = call.scratch(sum(chunks))
        for i, t in enumerate(dense):
            types = {"T": t.dtype, "R": t.dtype}
            call.run("optimizer", "sum_of_squares", types, _grid(t), t, (partial, sum(chunks[:i])), t.numel())
        types = {"T": torch.float32, "R": torch.float32}
        call.run("optimizer", "root_of_sum", types, (1,), partial, Out(norm), sum(chunks))
    return norm


def _why_not_unscale(grads: Sequence[Tensor], inv_scale: float) -> Sequence[str]:
    return reasons(*grads)


@OpenCL.impl(ops.unscale_and_check, id="opencl/cl", why_not=_why_not_unscale)
def unscale_and_check(grads: Sequence[Tensor], inv_scale: float) -> Tensor:
    found = torch.zeros(())
    dense = [g.contiguous() for g in grads]
    with Call() as call:
        for g in dense:
            if g.numel():
                types = {"T": g.dtype, "R": g.dtype}
                outs = (Out(g, update=True), Out(found, update=True))
                call.run("optimizer", "unscale", types, _grid(g), *outs, float(inv_scale), g.numel())
    for g, copy in zip(grads, dense):
        if copy is not g:  # the result of a copy goes back to where it came from
            g.copy_(copy)
    return found
