"""flash_attention (kernels/attention.cl): all layouts are first converted to rows of floats (kernels/rows.cl).

Besides the output, the forward pass saves the log-sum-exp, and for 16-bit tensors also the unrounded output, because
the gradient of the scores is a difference in which rounding errors of the output would be amplified by cancellation.
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
from hal import Call, Rng, ops
from hal.backend_tools import (
    AttentionSpec,
    CuSeqlens,
    attention_spec,
    attention_strides,
    bounded,
    draw_steps,
    packed_starts,
    with_signature_of,
)

from .device import OpenCL
from .engine import CHUNK, engine
from .memory import KernelCall, Out
from .tensors import reasons

HEADS = (64, 128, 256)
"""The head sizes that kernels are compiled for; a call uses the smallest that fits. A work-item holds up to four tiles
of that size in private memory."""


@dataclass(frozen=True)
class _Problem:
    """The kernels' description of a call, in which a dense batch is a set of packed sequences of equal length.

    sequences [count, 4]: (q0, q1, k0, k1), the first token and the end of the queries and of the keys.
    """

    spec: AttentionSpec
    tokens: tuple[int, int]
    sequences: Tensor
    parameters: tuple[Any, ...]

    @property
    def d(self) -> int:
        """The head size."""
        return self.spec.d

    def heads(self, keys: bool) -> int:
        """The number of key/value heads, or of query heads."""
        return self.spec.kv_heads if keys else self.spec.heads

    @property
    def longest(self) -> tuple[int, int]:
        """The length of the longest sequence of queries, and of keys."""
        if not len(self.sequences):
            return 0, 0
        q0, q1, k0, k1 = self.sequences.unbind(1)
        return int((q1 - q0).max()), int((k1 - k0).max())


def _why_not(call: Call) -> Sequence[str]:
    spec = attention_spec(call)
    refusals = [*reasons(call.q, call.k, call.v), *spec.refusals("the kernel")]
    if spec.d > HEADS[-1]:
        refusals.append(f"head size {spec.d} (at most {HEADS[-1]}: a tile of heads must fit a work-item)")
    return refusals


def _rows(call: KernelCall, x: Tensor, problem: _Problem, keys: bool) -> Any:
    """x (keys or queries) converted to a scratch buffer of float rows [heads][tokens][d]."""
    p = problem
    rows = call.scratch(p.heads(keys) * p.tokens[keys] * p.d)
    _convert(call, "to_rows", x if x.stride(-1) == 1 else x.contiguous(), p, keys, rows)
    return rows


def _convert(call: KernelCall, name: str, x: Tensor, p: _Problem, keys: bool, rows: Any) -> None:
    """Runs to_rows, from x to the buffer `rows` [heads][tokens][d], or from_rows, the other way."""
    tokens, heads, length = p.tokens[keys], p.heads(keys), p.spec.skv if keys else p.spec.sq
    if not x.numel():
        return
    grid = (-(-tokens // max(1, CHUNK // p.d)), heads)
    both = (x, rows) if name == "to_rows" else (rows, Out(x))
    shape = (tokens, max(1, length), p.d, *attention_strides(p.spec.layout, x.stride(), p.d))
    call.run("rows", name, {"T": x.dtype}, grid, *both, *shape)


def _run(call: KernelCall, name: str, p: _Problem, keys: bool, mask: Tensor | None, *tensors: Any) -> None:
    """Runs a kernel of attention.cl over tiles of keys or of queries."""
    lanes, group = engine().lanes, engine().group
    tiles = -(-p.longest[keys] // lanes)
    if not tiles or not len(p.sequences):
        return
    # Private arrays need a size known at compile time: the smallest one that fits.
    head = next(h for h in HEADS if p.d <= h)
    grid = (-(-tiles // group), p.heads(keys), len(p.sequences))
    call.run("attention", name, {"HEAD": head}, grid, *tensors, p.sequences, mask, *p.parameters)


def _backward(residuals: tuple[Any, ...], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, like q, k and v, from dout like out."""
    q, k, v, out, lse, mask, spec, cu_seqlens = residuals
    p = _problem(spec, mask, cu_seqlens)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    with KernelCall() as call:
        q_rows, k_rows, v_rows = _rows(call, q, p, False), _rows(call, k, p, True), _rows(call, v, p, True)
        dout_rows = _rows(call, dout, p, False)
        out_rows = _rows(call, out, p, False) if q.dtype == torch.float32 else out
        q_size, k_size = p.heads(False) * p.tokens[0] * p.d, p.heads(True) * p.tokens[1] * p.d
        dq_rows, dk_rows, dv_rows = call.scratch(q_size), call.scratch(k_size), call.scratch(k_size)
        delta = call.scratch(p.heads(False) * p.tokens[0])
        _run(call, "backward_q", p, False, mask, q_rows, k_rows, v_rows, out_rows, lse, dout_rows, dq_rows, delta)
        _run(call, "backward_kv", p, True, mask, q_rows, k_rows, v_rows, lse, dout_rows, delta, dk_rows, dv_rows)
        for x, rows, keys in ((dq, dq_rows, False), (dk, dk_rows, True), (dv, dv_rows, True)):
            _convert(call, "from_rows", x, p, keys, rows)
    return dq, dk, dv


def _problem(spec: AttentionSpec, mask: Tensor | None, cu_seqlens: CuSeqlens) -> _Problem:
    """The kernels' description of a call; parameters are in the order of the macro CALL in attention.cl."""
    b, n, sq, skv = spec.batch, spec.heads, spec.sq, spec.skv
    # A dense batch becomes packed sequences of equal lengths, because kernels work on rows [heads][tokens][d].
    q_starts, k_starts = cu_seqlens or ([i * length for i in range(b + 1)] for length in (sq, skv))
    sequences = torch.tensor([(*a, *c) for a, c in zip(pairwise(q_starts), pairwise(k_starts))], dtype=torch.int32)
    mask_strides = (0, 0, 0, 0) if mask is None else mask.expand(b, n, sq, skv).stride()
    rng, draw = Rng(0), (0, 0, 0, 0)
    if spec.rng is not None:
        rng, draw = spec.rng, draw_steps(spec.rng, (n, sq, skv) if spec.packed else (b, n, sq, skv))
    tokens = (b * sq, b * skv)
    parameters = (
        *(n, spec.kv_heads, *tokens, spec.d, bounded(spec.pre), bounded(spec.next), int(spec.packed), spec.scale),
        *(*mask_strides, np.uint64(rng.seed), np.uint64(rng.offset), *draw),
        *(np.uint32(hal.dropout_threshold(spec.dropout_p)), 1.0 / (1.0 - spec.dropout_p)),
    )
    return _Problem(spec, tokens, sequences, parameters)


@OpenCL.impl(ops.flash_attention, id="opencl/cl", why_not=_why_not, bwd=_backward, version=2)
@with_signature_of(ops.flash_attention, without=("bias", "sinks"), spec=attention_spec, cu_seqlens=packed_starts)
def flash_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens: CuSeqlens, return_lse: bool
) -> tuple[Tensor | tuple[Tensor, Tensor], tuple[Any, ...]]:
    p = _problem(spec, mask, cu_seqlens)
    out = torch.zeros(q.shape, dtype=q.dtype)
    lse = torch.full((spec.heads, spec.sq) if spec.packed else (spec.batch, spec.heads, spec.sq), -math.inf)
    shape = (spec.heads, p.tokens[0], spec.d)
    # The unrounded output of 16-bit calls, for the backward pass; float32 calls save the output itself.
    kept = None if q.dtype == torch.float32 else torch.empty(shape)
    with KernelCall() as call:
        inputs = (_rows(call, q, p, False), _rows(call, k, p, True), _rows(call, v, p, True))
        rows = call.scratch(math.prod(shape)) if kept is None else Out(kept)
        _run(call, "forward", p, False, mask, *inputs, rows, Out(lse))
        _convert(call, "from_rows", out, p, False, rows)
    residuals = (q, k, v, out if kept is None else kept, lse, mask, spec, cu_seqlens)
    return (out, lse) if return_lse else out, residuals
