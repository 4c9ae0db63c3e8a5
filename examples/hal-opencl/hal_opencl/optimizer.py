"""adamw, l2norm and unscale_and_check (kernels/optimizer.cl): one launch per tensor, one wait per call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import Call, backend_tools, ops
from hal.backend_tools import AdamWMember, AdamWScalars, with_signature_of

from .device import OpenCL
from .engine import CHUNK
from .memory import KernelCall, Out
from .tensors import reasons, refuses


def _why_not_adamw(call: Call) -> Sequence[str]:
    written = backend_tools.adamw_written(call)
    return backend_tools.in_place_reasons(written) or reasons(*written, *call.grads)


@OpenCL.impl(ops.adamw, id="opencl/cl", why_not=_why_not_adamw)
@with_signature_of(ops.adamw, members=backend_tools.adamw_members, scalars=backend_tools.adamw_scalars)
def adamw(members: Sequence[AdamWMember], scalars: AdamWScalars) -> None:
    s, (correction1, correction2) = scalars, scalars.corrections
    rates = (s.decay, s.lr / correction1, s.beta1, 1.0 - s.beta1, s.beta2, 1.0 - s.beta2, correction2, s.eps)
    numbers = tuple(float(n) for n in (*rates, s.grad_scale))
    with KernelCall() as call:
        for p, g, m, v, copy in members:
            if not p.numel():
                continue
            call.run(
                *("optimizer", "adamw", {"T": g.dtype, "R": p.dtype if copy is None else copy.dtype}, _grid(p)),
                *(Out(p, update=True), g.contiguous(), Out(m, update=True), Out(v, update=True)),
                *(None if copy is None else Out(copy), *numbers, p.numel()),
            )


def _grid(t: Tensor) -> tuple[int]:
    """The grid of a kernel over the elements of t."""
    return (-(-t.numel() // CHUNK),)


@OpenCL.impl(ops.l2norm, id="opencl/cl", why_not=refuses(ops.l2norm, "tensors"))
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    dense = [t.contiguous() for t in tensors if t.numel()]
    norm, chunks = torch.zeros(()), [_grid(t)[0] for t in dense]
    if not dense:
        return norm
    with KernelCall() as call:
        partial = call.scratch(sum(chunks))
        for i, t in enumerate(dense):
            types = {"T": t.dtype, "R": t.dtype}
            # Each tensor's partial sums follow those of the tensors before it.
            call.run("optimizer", "sum_of_squares", types, _grid(t), t, (partial, sum(chunks[:i])), t.numel())
        types = {"T": torch.float32, "R": torch.float32}
        call.run("optimizer", "root_of_sum", types, (1,), partial, Out(norm), sum(chunks))
    return norm


@OpenCL.impl(ops.unscale_and_check, id="opencl/cl", why_not=refuses(ops.unscale_and_check, "grads"))
def unscale_and_check(grads: Sequence[Tensor], inv_scale: float) -> Tensor:
    bad = torch.zeros(())
    dense = [g.contiguous() for g in grads]
    with KernelCall() as call:
        for g in dense:
            if g.numel():
                types = {"T": g.dtype, "R": g.dtype}
                outs = (Out(g, update=True), Out(bad, update=True))
                call.run("optimizer", "unscale", types, _grid(g), *outs, float(inv_scale), g.numel())
    backend_tools.copy_back(grads, dense)
    return bad
