"""cuda/fused: HAL's own kernels (kernels/attention.cu): dropout with HAL's bits, and any window or mask, without scores
in memory.

They accept what torch's kernels refuse: dropout, negative windows, scales that are not positive, packed sequences in
float32, sinks, and heads of v that are narrower or wider than those of q and k (a tile is as wide as the wider of them,
and its other columns are 0). 16-bit products run on tensor cores. Results repeat bit for bit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal import dropout_threshold
from hal.backend_tools import AttentionSpec, bounded, draw_reasons, draw_steps

from .. import launch
from ..random import packed_draw
from ..tensors import LANES, TYPE
from .common import Given, Request, register

ID = "cuda/fused"

LARGEST = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}
"""The largest head size whose tiles fit into 48 KiB of shared memory."""

FORWARD = 64
BACKWARD = {(4, 64): 64, (4, 128): 32, (2, 64): 64, (2, 128): 64, (2, 256): 32}
"""Queries of a block; and (bytes per element, D) -> queries or keys of one: Q and OWN of attention.cu."""
THREADS = 128
"""Of a block of the kernels that compute tiles."""


def _refuse(request: Request) -> Sequence[str]:
    spec, refusals = request.spec, []
    largest = LARGEST.get(request.dtype)
    if largest is not None and _widest(spec) > largest:
        refusals.append(f"head size {_widest(spec)} (fused takes up to {largest} in {request.dtype})")
    tiles = spec.batch * spec.heads * -(-max(spec.sq, spec.skv) // 16)
    if max(spec.sq, spec.skv) > 2**31 - 64 or tiles >= 2**31:  # the last tile may end beyond the length
        refusals.append(
            f"{spec.batch} x {spec.heads} heads of {spec.sq} queries and {spec.skv} keys "
            "(fused counts them and their tiles in 32 bits)"
        )
    rng = spec.rng
    return [*refusals, *draw_reasons(rng, () if rng is None else rng.full_shape or ())]


def _widest(spec: AttentionSpec) -> int:
    return max(spec.d, spec.dv)


def _dense(x: Tensor) -> Tensor:
    """x [b, heads, length, d] with adjacent channels; copied if necessary."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _view(x: Tensor) -> launch.Struct:
    """struct View."""
    return launch.Struct("=4q", x, *x.stride()[:3])


def _shape(spec: AttentionSpec, cu_q: Tensor | None, cu_k: Tensor | None, *tensors: Tensor) -> launch.Struct:
    """struct Shape. tensors: those whose tiles are loaded or stored."""
    lanes = LANES[tensors[0].dtype]
    vec = spec.d % lanes == 0 == spec.dv % lanes and all(
        x.data_ptr() % 16 == 0 and all(s % lanes == 0 for s in x.stride()[:3]) for x in tensors
    )
    sizes = (spec.batch, spec.heads, spec.group, spec.sq, spec.skv, spec.d, spec.dv)
    sequences = 0 if cu_q is None else cu_q.numel() - 1
    window = (bounded(spec.pre), bounded(spec.next), sequences, int(spec.top_left))
    return launch.Struct("=7qd7q", *sizes, spec.scale, *window, cu_q, cu_k, int(vec))


def _mask(spec: AttentionSpec, mask: Tensor | None) -> launch.Struct:
    """struct Mask; the bytes of a bool tensor are 0 and 1. Broadcast dimensions get stride 0."""
    if mask is None:
        return launch.Struct("=5q", None, 0, 0, 0, 0)
    mask = mask.expand(spec.batch, spec.heads, spec.sq, spec.skv)
    return launch.Struct("=5q", mask, *mask.stride())


def _dropout(spec: AttentionSpec) -> bytes:
    """struct Dropout."""
    if spec.rng is None:
        return packed_draw(0, 0, 0, (0,) * 4, (0,) * 3) + struct.pack("=qd", 0, 1.0)
    shape = (spec.heads, spec.sq, spec.skv) if spec.packed else (spec.batch, spec.heads, spec.sq, spec.skv)
    index0, *strides = draw_steps(spec.rng, shape)
    draw = packed_draw(spec.rng.seed, spec.rng.offset, index0, (1, 1, 1, 1), strides)
    return draw + struct.pack("=qd", dropout_threshold(spec.dropout_p), 1.0 / (1.0 - spec.dropout_p))


def _largest_head(spec: AttentionSpec) -> int:
    """D: the smallest head size with a kernel that is not below the call's."""
    return next(d for d in (64, 128, 256) if d >= _widest(spec))


def _blocks(heads: int, length: int, tile: int) -> tuple[int, int]:
    """The grid for all tiles of so many heads (of all batch entries)."""
    return launch.blocks(heads * -(-length // tile)), 1


def _forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: Given
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """out [b, n, sq, e], lse [b, n, sq], and what the backward pass needs."""
    q, k, v = (_dense(x) for x in (q, k, v))
    cu_q, cu_k = (None if cu is None else cu.contiguous() for cu in (given.cu_q, given.cu_k))
    out = torch.empty_like(q) if spec.dv == spec.d else q.new_empty((*q.shape[:-1], spec.dv))
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    sinks = None if given.sinks is None else given.sinks.float().contiguous()
    head = _largest_head(spec)
    launch.run(
        f"attention_fwd<{TYPE[q.dtype]}, {head}>",
        _blocks(spec.batch * spec.heads, spec.sq, FORWARD),
        THREADS,
        *map(_view, (q, k, v, out)),
        lse,
        _shape(spec, cu_q, cu_k, q, k, v, out),
        _mask(spec, given.mask),
        _dropout(spec),
        sinks,
    )
    return out, lse, (q, k, v, out, lse, given.mask, cu_q, cu_k, given.sinks)


def _backward(spec: AttentionSpec, saved: list[Any], dout: Tensor) -> tuple[Tensor | None, ...]:
    """dq [b, n, sq, d], dk [b, g, skv, d], dv [b, g, skv, e] and dsinks [n] from dout [b, n, sq, e]."""
    q, k, v, out, lse, mask, cu_q, cu_k, sinks = saved
    dout, head = _dense(dout), _largest_head(spec)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    delta = torch.empty_like(lse)
    kind, tile = f"<{TYPE[q.dtype]}, {head}>", BACKWARD[q.element_size(), head]
    shape = _shape(spec, cu_q, cu_k, q, k, v, dout, dq, dk, dv)
    rows = spec.batch * spec.heads * spec.sq
    launch.run(
        f"attention_delta<{TYPE[q.dtype]}>", (launch.blocks(-(-rows // 8)), 1), 256, *_views(dout, out), delta, shape
    )
    how = (lse, delta, shape, _mask(spec, mask), _dropout(spec))
    grid = _blocks(spec.batch * spec.heads, spec.sq, tile)
    launch.run(f"attention_dq{kind}", grid, THREADS, *_views(q, k, v, dout, dq), *how)
    grid = _blocks(spec.batch * spec.kv_heads, spec.skv, tile)
    launch.run(f"attention_dkv{kind}", grid, THREADS, *_views(q, k, v, dout, dk, dv), *how)
    return dq, dk, dv, None if sinks is None else _sink_gradient(sinks, lse, delta)


def _sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsinks [n]: the softmax's gradient for a key whose value is 0, so that only the sum's share of it remains."""
    p = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks.float()[:, None] - lse))
    return -(p * delta).sum((0, 2)).to(sinks.dtype)


def _views(*tensors: Tensor) -> list[launch.Struct]:
    return [_view(x) for x in tensors]


register(ID, refuse=_refuse, forward=_forward, backward=_backward, takes=("top_left", "dv", "sinks"))
