"""flash_attention (kernels/attention.cl): every layout is brought to rows of floats first (kernels/rows.cl).

Besides the output, the forward pass keeps the log-sum-exp, and for 16-bit tensors the output before it was rounded: the
gradient of the scores is a difference that cancels, and loses its digits otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hal
from hal import ContractError, Rng, ops

from .device import OpenCL
from .engine import CHUNK, engine
from .memory import Call, Out
from .tensors import reasons

_UNBOUNDED = 1 << 40
"""Stands for None in pre_tokens and next_tokens: beyond any sequence, far from overflow."""

HEADS = (64, 128, 256)
"""Head sizes that kernels are built for, the smallest that fits; a work-item keeps up to four tiles of that size."""


@dataclass(frozen=True)
class _Problem:
    """A call, in the kernels' terms: `sequences` has rows (q0, q1, k0, k1); a dense batch is packed sequences."""

    layout: str
    heads: int
    kv_heads: int
    d: int
    lengths: tuple[int, int]
    tokens: tuple[int, int]
    sequences: Tensor
    parameters: tuple[Any, ...]

    @property
    def longest(self) -> tuple[int, int]:
        """The longest sequence of queries, and of keys."""
        if not len(self.sequences):
            return 0, 0
        q0, q1, k0, k1 = self.sequences.unbind(1)
        return int((q1 - q0).max()), int((k1 - k0).max())


def _why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    pre_tokens: int | None = None,
    next_tokens: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Sequence[str]:
    d = q.shape[-1] // num_heads if layout in ("SBH", "BSH") and num_heads else q.shape[-1]
    too_big = [f"head size {d} (at most {HEADS[-1]}: a tile of heads must fit a work-item)"] if d > HEADS[-1] else []
    return [*reasons(q, k, v), *too_big]


def _strides(x: Tensor, layout: str, d: int) -> tuple[int, int, int]:
    """(sequence, token, head) strides of a tensor of `layout`."""
    if layout == "TND":
        return 0, x.stride(0), x.stride(1)
    head = d if layout in ("SBH", "BSH") else x.stride(layout.index("N"))
    return x.stride(layout.index("B")), x.stride(layout.index("S")), head


def _ends(name: str, cu: Tensor, total: int) -> list[int]:
    ends: list[int] = cu.tolist()
    if ends[0] != 0 or ends[-1] != total or any(a > b for a, b in pairwise(ends)):
        raise ContractError(f"flash_attention: expected {name} rising from 0 to {total}; found {ends}")
    return ends


def _rows(call: Call, x: Tensor, problem: _Problem, keys: bool) -> Any:
    """x as rows of floats, [heads][tokens][d]."""
    p, heads = problem, problem.kv_heads if keys else problem.heads
    rows = call.scratch(heads * p.tokens[keys] * p.d)
    _convert(call, "to_rows", x if x.stride(-1) == 1 else x.contiguous(), p, keys, rows)
    return rows


def _convert(call: Call, name: str, x: Tensor, p: _Problem, keys: bool, rows: Any) -> None:
    tokens, heads = p.tokens[keys], p.kv_heads if keys else p.heads
    if not x.numel():
        return
    grid = (-(-tokens // max(1, CHUNK // p.d)), heads)
    both = (x, rows) if name == "to_rows" else (rows, Out(x))
    shape = (tokens, max(1, p.lengths[keys]), p.d, *_strides(x, p.layout, p.d))
    call.run("rows", name, {"T": x.dtype}, grid, *both, *shape)


def _run(call: Call, name: str, p: _Problem, keys: bool, mask: Tensor | None, *tensors: Any) -> None:
    """One of attention.cl's kernels, with tiles of keys or of queries."""
    lanes, group = engine().lanes, engine().group
    tiles = -(-p.longest[keys] // lanes)
    if not tiles or not len(p.sequences):
        return
    head = next(h for h in HEADS if p.d <= h)
    grid = (-(-tiles // group), p.kv_heads if keys else p.heads, len(p.sequences))
    call.run("attention", name, {"HEAD": head}, grid, *tensors, p.sequences, mask, *p.parameters)


def _backward(residuals: tuple[Any, ...], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse, mask, p = residuals
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    with Call() as call:
        q_rows, k_rows, v_rows = _rows(call, q, p, False), _rows(call, k, p, True), _rows(call, v, p, True)
        dout_rows = _rows(call, dout, p, False)
        out_rows = _rows(call, out, p, False) if q.dtype == torch.float32 else out
        q_size, k_size = p.heads * p.tokens[0] * p.d, p.kv_heads * p.tokens[1] * p.d
        dq_rows, dk_rows, dv_rows = call.scratch(q_size), call.scratch(k_size), call.scratch(k_size)
        delta = call.scratch(p.heads * p.tokens[0])
        _run(call, "backward_q", p, False, mask, q_rows, k_rows, v_rows, out_rows, lse, dout_rows, dq_rows, delta)
        _run(call, "backward_kv", p, True, mask, q_rows, k_rows, v_rows, lse, dout_rows, delta, dk_rows, dv_rows)
        for x, rows, keys in ((dq, dq_rows, False), (dk, dk_rows, True), (dv, dv_rows, True)):
            _convert(call, "from_rows", x, p, keys, rows)
    return dq, dk, dv


@OpenCL.impl(ops.flash_attention, id="opencl/cl", why_not=_why_not, bwd=_backward)
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    pre_tokens: int | None = None,
    next_tokens: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor | tuple[Tensor, Tensor], tuple[Any, ...]]:
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    if layout in ("SBH", "BSH"):
        n = num_heads or 1
        g, d = num_kv_heads or n, q.shape[-1] // n
    else:
        n, g, d = q.shape[layout.index("N")], k.shape[layout.index("N")], q.shape[-1]
    if packed:
        assert cu_seqlens_q is not None and cu_seqlens_k is not None
        ends = _ends("cu_seqlens_q", cu_seqlens_q, q.shape[0]), _ends("cu_seqlens_k", cu_seqlens_k, k.shape[0])
        b, lengths = 1, (q.shape[0], k.shape[0])
    else:
        b, lengths = q.shape[layout.index("B")], (q.shape[layout.index("S")], k.shape[layout.index("S")])
        ends = [i * lengths[0] for i in range(b + 1)], [i * lengths[1] for i in range(b + 1)]
    sequences = torch.tensor([(*a, *c) for a, c in zip(pairwise(ends[0]), pairwise(ends[1]))], dtype=torch.int32)
    mask_strides = (0, 0, 0, 0) if mask is None else mask.expand(b, n, *lengths).stride()
    draw: tuple[int, ...] = (0, 0, 0, 0)
    if rng is None or dropout_p == 0.0:
        rng, dropout_p = Rng(0), 0.0
    else:
        first, steps = rng.indexing((n, *lengths) if packed else (b, n, *lengths))
        draw = (first, *((0,) * (4 - len(steps))), *steps[:-1])
    before, after = (
        _UNBOUNDED if w is None else max(-_UNBOUNDED, min(w, _UNBOUNDED)) for w in (pre_tokens, next_tokens)
    )
    tokens = (b * lengths[0], b * lengths[1])
    parameters = (
        *(n, g, *tokens, d, before, after, int(packed), float(1.0 / math.sqrt(d) if scale is None else scale)),
        *(*mask_strides, np.uint64(rng.seed), np.uint64(rng.offset), *draw),
        *(np.uint32(hal.dropout_threshold(dropout_p)), 1.0 / (1.0 - dropout_p)),
    )
    problem = _Problem(layout, n, g, d, lengths, tokens, sequences, parameters)
    out, lse = (
        torch.zeros(q.shape, dtype=q.dtype),
        torch.full((n, lengths[0]) if packed else (b, n, lengths[0]), -math.inf),
    )
    kept = None if q.dtype == torch.float32 else torch.empty(n, tokens[0], d)
    with Call() as call:
        inputs = (_rows(call, q, problem, False), _rows(call, k, problem, True), _rows(call, v, problem, True))
        rows = call.scratch(n * tokens[0] * d) if kept is None else Out(kept)
        _run(call, "forward", problem, False, mask, *inputs, rows, Out(lse))
        _convert(call, "from_rows", out, problem, False, rows)
    residuals = (q, k, v, out if kept is None else kept, lse, mask, problem)
    return (out, lse) if return_lse else out, residuals
