"""adamw, l2norm and unscale_and_check (kernels/optimizer.cu): one launch per dtype and 48 tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import hal
from hal import address, ops

from . import launch
from .device import Cuda
from .tensors import TYPE, reasons

LISTED, CHUNK = 48, 16384
"""As in optimizer.cu: tensors per launch, elements per block."""


def _tables(lists: Sequence[Sequence[Tensor | None]]) -> Iterator[tuple[bytes, int]]:
    """(struct Tensors, blocks) for every LISTED non-empty tensors; lists[l][i] belongs to tensor i."""
    members = [i for i, t in enumerate(lists[0]) if t is not None and t.numel()]
    for begin in range(0, len(members), LISTED):
        part = members[begin : begin + LISTED]
        rest = (0,) * (LISTED - len(part))
        addresses = [a for tensors in lists for a in (*(address(tensors[i]) for i in part), *rest)]
        sizes = [t.numel() for t in (lists[0][i] for i in part) if t is not None]
        first, blocks = [], 0
        for size in sizes:
            first.append(blocks)
            blocks += -(-size // CHUNK)
        yield (
            struct.pack(f"=q{len(addresses) + 2 * LISTED}q", len(part), *addresses, *sizes, *rest, *first, *rest),
            blocks,
        )


def _reasons(tensors: Sequence[Tensor]) -> Sequence[str]:
    """`reasons`, asked once for each dtype and device: lists are long, and it looks at nothing else."""
    return reasons(*{(t.dtype, t.device): t for t in tensors}.values())


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
    return _reasons([*written, *grads])


@Cuda.impl(ops.adamw, id="cuda/kernel", why_not=_why_not_adamw)
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
    # struct Adam: decay, beta1, beta2, rate, correction, eps, grad_scale
    adam = struct.pack(
        "=7d", 1.0 - lr * weight_decay, beta1, beta2, lr / correction1, 1.0 / correction2, eps, grad_scale
    )
    dense = [g.contiguous() for g in grads]
    copies: Sequence[Tensor | None] = [None] * len(params) if model_params is None else model_params
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, (g, copy) in enumerate(zip(dense, copies)):
        kinds.setdefault((g.dtype, torch.float32 if copy is None else copy.dtype), []).append(i)
    for (grad, copied), members in kinds.items():
        lists = [[tensors[i] for i in members] for tensors in (params, dense, exp_avgs, exp_avg_sqs, copies)]
        for table, blocks in _tables(lists):
            launch.run(f"adamw<{TYPE[grad]}, {TYPE[copied]}>", (blocks, 1), 256, table, adam)


def _by_dtype(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.dtype, list[Tensor]]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    yield from groups.items()


def _why_not_l2norm(tensors: Sequence[Tensor]) -> Sequence[str]:
    return _reasons(tensors)


@Cuda.impl(ops.l2norm, id="cuda/kernel", why_not=_why_not_l2norm)
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    dense = [t.contiguous() for t in tensors]
    chunks = sum(-(-t.numel() // CHUNK) for t in dense)
    where = dense[0].device if dense else hal.device()
    if not chunks:
        return torch.zeros((), dtype=torch.float32, device=where)
    partial, out = (torch.empty(shape, dtype=torch.float32, device=where) for shape in ((chunks,), ()))
    done = 0
    for dtype, group in _by_dtype(dense):
        for table, blocks in _tables([group]):
            launch.run(f"sum_squares<{TYPE[dtype]}>", (blocks, 1), 256, table, partial.data_ptr() + 4 * done)
            done += blocks
    launch.run("root_of_sum", (1, 1), 256, partial.data_ptr(), out.data_ptr(), chunks)
    return out


def _why_not_unscale(grads: Sequence[Tensor], inv_scale: float) -> Sequence[str]:
    return _reasons(grads)


@Cuda.impl(ops.unscale_and_check, id="cuda/kernel", why_not=_why_not_unscale)
def unscale_and_check(grads: Sequence[Tensor], inv_scale: float) -> Tensor:
    found = torch.zeros((), dtype=torch.float32, device=grads[0].device if grads else hal.device())
    for dtype, group in _by_dtype(grads):
        dense = [g.contiguous() for g in group]
        for table, blocks in _tables([dense]):
            launch.run(f"unscale<{TYPE[dtype]}>", (blocks, 1), 256, table, float(inv_scale), found.data_ptr())
        for g, copy in zip(group, dense):
            if not g.is_contiguous():  # the result of a copy goes back to where it came from
                g.copy_(copy)
    return found
