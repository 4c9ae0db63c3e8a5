"""cuda/cudnn: cuDNN's attention through torch, for full or causal square masks, GQA and head sizes up to 128."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hal.backend_tools import AttentionSpec

from .. import launch
from . import stand_ins
from .common import Given, Request, readable, register, sixteen_bit

ID = "cuda/cudnn"
WHOLE_BLOCKS_BEFORE = 91501
"""cuDNN before 9.15.1 may read out of bounds for lengths that are not multiples of 128 (pytorch issue 169849; see also
check_prefer_cudnn_attention in torch's sdp_utils.cpp)."""


@cache
def _version() -> int | None:
    """The cuDNN version that torch loads, 9.15.1 as 91501; None if torch has no cuDNN."""
    return torch.backends.cudnn.version()


def _reads_past_the_end(spec: AttentionSpec) -> bool:
    version = None if launch.simulated() else _version()
    return version is not None and version < WHOLE_BLOCKS_BEFORE and bool(spec.sq % 128 or spec.skv % 128)


def _refuse(request: Request) -> list[str]:
    spec = request.spec
    refusals = sixteen_bit(request, "cudnn")
    if spec.packed:
        refusals.append("packed sequences (cudnn, as torch calls it, takes dense batches)")
    if spec.d % 8 or spec.d > 128:
        refusals.append(f"head size {spec.d} (cudnn takes multiples of 8 up to 128)")
    if spec.sq == 1 or spec.skv == 1:
        refusals.append(f"{spec.sq} queries and {spec.skv} keys (cudnn takes at least two of each)")
    if _reads_past_the_end(spec):
        refusals.append(
            f"{spec.sq} queries and {spec.skv} keys (cudnn {_version()} may read past the end of lengths that are "
            f"not multiples of 128; {WHOLE_BLOCKS_BEFORE} does not)"
        )
    if not spec.unbounded and not (spec.causal and spec.sq == spec.skv):
        refusals.append(
            f"window ({spec.pre}, {spec.next}) of {spec.sq} queries and {spec.skv} keys "
            "(cudnn takes none, or causal squares)"
        )
    return refusals


def _readable(x: Tensor) -> Tensor:
    """Like `readable`, but also copies x if elements share memory, as in an expanded gradient."""
    return readable(x) if all(x.stride()) else x.clone(memory_format=torch.contiguous_format)


def _forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: Given
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """out [b, n, sq, d], lse [b, n, sq], and what the backward pass needs."""
    kernel = stand_ins.cudnn_forward if launch.simulated() else torch.ops.aten._scaled_dot_product_cudnn_attention
    q, k, v = (_readable(x) for x in (q, k, v))
    results = kernel(q, k, v, None, True, 0.0, spec.causal, False, scale=spec.scale)
    out, lse, starts_q, starts_k, max_q, max_k, seed, offset, _ = results
    saved = (q, k, v, out, lse, seed, offset, starts_q, starts_k, max_q, max_k)
    return out, lse.squeeze(-1) if lse.ndim == 4 else lse, saved


def _backward(spec: AttentionSpec, saved: list[Any], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv from dout [b, n, sq, d]."""
    aten = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    kernel = stand_ins.cudnn_backward if launch.simulated() else aten
    q, k, v, out, lse, seed, offset, starts_q, starts_k, max_q, max_k = saved
    state = (seed, offset, None, starts_q, starts_k, max_q, max_k)
    # torch keeps one plan per shape and layout of q, k and v. The strides of the first dout are part of the plan, but
    # not of the key that it is found by (run_cudnn_SDP_bprop in torch's cudnn/MHA.cpp), so all get those of out.
    if dout.stride() != out.stride() or readable(dout) is not dout:
        dout = torch.empty_like(out).copy_(dout)
    dq, dk, dv = kernel(dout, q, k, v, out, lse, *state, 0.0, spec.causal, scale=spec.scale)
    return dq, dk, dv


register(
    ID,
    refuse=_refuse,
    forward=_forward,
    backward=_backward,
    nondeterministic="cudnn's backward adds in no fixed order",
)
