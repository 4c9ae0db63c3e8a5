"""adamw, l2norm and unscale_and_check (kernels/optimizer.cu): one launch per dtype and up to 48 tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import hal
from hal import Call, backend_tools, ops
from hal.backend_tools import AdamWMember, AdamWScalars, with_signature_of

from . import launch
from .device import Cuda
from .tensors import TYPE, reasons

LISTED, CHUNK = 48, 16384
"""As in optimizer.cu: tensors per launch, elements per block."""


def _tables(lists: Sequence[Sequence[Tensor | None]]) -> Iterator[tuple[launch.Struct, int]]:
    """(struct Tensors, blocks) for every LISTED non-empty tensors; lists[l][i] belongs to tensor i."""
    members = [i for i, t in enumerate(lists[0]) if t is not None and t.numel()]
    # The struct has room for LISTED tensors; unused entries are zero and no block refers to them.
    for begin in range(0, len(members), LISTED):
        part = members[begin : begin + LISTED]
        rest = (0,) * (LISTED - len(part))
        listed = [t for tensors in lists for t in (*(tensors[i] for i in part), *rest)]
        sizes = [t.numel() for t in (lists[0][i] for i in part) if t is not None]
        first, blocks = [], 0
        for size in sizes:
            first.append(blocks)
            blocks += -(-size // CHUNK)
        table = launch.Struct(f"=q{len(listed) + 2 * LISTED}q", len(part), *listed, *sizes, *rest, *first, *rest)
        yield table, blocks


def _reasons(tensors: Sequence[Tensor]) -> Sequence[str]:
    """`reasons` of one tensor per dtype and device, because it depends only on these and lists may be long."""
    return reasons(*{(t.dtype, t.device): t for t in tensors}.values())


_refuses = partial(backend_tools.why_not_tensors, reasons=lambda *tensors: _reasons(tensors))


def _why_not_adamw(call: Call) -> Sequence[str]:
    written = backend_tools.adamw_written(call)
    factor = [] if call.clip_factor is None else [call.clip_factor]
    return backend_tools.in_place_reasons(written) or _reasons([*written, *call.grads, *factor])


# The kernel reads clip_factor, so that the host does not wait for the norm from which it is computed.
_members = partial(backend_tools.adamw_members, read=False)
_scalars = partial(backend_tools.adamw_scalars, read=False)


@Cuda.impl(ops.adamw, id="cuda/kernel", why_not=_why_not_adamw)
@with_signature_of(ops.adamw, members=_members, scalars=_scalars)
def adamw(members: Sequence[AdamWMember], scalars: AdamWScalars, clip_factor: Tensor | None) -> None:
    s, (correction1, correction2) = scalars, scalars.corrections
    # The factors are computed here in double, so that the kernel rounds them to float32 only once.
    # struct Adam: decay, beta1, beta2, rate, correction, eps, grad_scale
    adam = struct.pack("=7d", s.decay, s.beta1, s.beta2, s.lr / correction1, 1.0 / correction2, s.eps, s.grad_scale)
    dense = [(p, g.contiguous(), m, v, copy) for p, g, m, v, copy in members]
    for (grad_dtype, copy_dtype), group in backend_tools.adamw_groups(dense).items():
        for table, blocks in _tables(list(zip(*group))):
            launch.run(f"adamw<{TYPE[grad_dtype]}, {TYPE[copy_dtype]}>", (blocks, 1), 256, table, adam, clip_factor)


@Cuda.impl(ops.l2norm, id="cuda/kernel", why_not=_refuses(ops.l2norm, "tensors"))
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    dense = [t.contiguous() for t in tensors]
    chunks = sum(-(-t.numel() // CHUNK) for t in dense)
    where = dense[0].device if dense else hal.device()
    if not chunks:
        return torch.zeros((), dtype=torch.float32, device=where)
    partial, out = (torch.empty(shape, dtype=torch.float32, device=where) for shape in ((chunks,), ()))
    # Every block writes one partial sum; the blocks of a launch follow those of the launches before it.
    done = 0
    for dtype, group in backend_tools.by_dtype(dense).items():
        for table, blocks in _tables([group]):
            launch.run(f"sum_squares<{TYPE[dtype]}>", (blocks, 1), 256, table, partial[done:])
            done += blocks
    launch.run("root_of_sum", (1, 1), 256, partial, out, chunks)
    return out


@Cuda.impl(ops.unscale_and_check, id="cuda/kernel", why_not=_refuses(ops.unscale_and_check, "grads"))
def unscale_and_check(grads: Sequence[Tensor], inv_scale: float) -> Tensor:
    bad = torch.zeros((), dtype=torch.float32, device=grads[0].device if grads else hal.device())
    for dtype, group in backend_tools.by_dtype(grads).items():
        dense = [g.contiguous() for g in group]
        for table, blocks in _tables([dense]):
            launch.run(f"unscale<{TYPE[dtype]}>", (blocks, 1), 256, table, float(inv_scale), bad)
        backend_tools.copy_back(group, dense)
    return bad
