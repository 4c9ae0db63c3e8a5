"""Shared by the attention implementations: layouts as views, empty calls, registration.

An implementation gets q [b, n, sq, d], k [b, g, skv, d] and v [b, g, skv, e] as views of the caller's tensors (packed
sequences have b = 1 and cu_seqlens), and returns out and lse with the same order of dimensions. Calls without queries
or keys are handled here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal import Call, ops
from hal.backend_tools import AttentionSpec, attention_spec, with_signature_of

from .. import launch
from ..device import Cuda
from ..tensors import reasons

Forward = Callable[..., tuple[Tensor, Tensor, tuple[Any, ...]]]
Backward = Callable[..., tuple[Tensor | None, ...]]


class Given(NamedTuple):
    """The tensors of a call other than q, k and v; lse: whether the caller gets the log-sum-exp."""

    mask: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    slopes: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    lse: bool


@dataclass(frozen=True)
class Request:
    """The inputs of a refusal: the call's spec, its dtype and the shape of its mask."""

    spec: AttentionSpec
    dtype: torch.dtype
    mask: Tensor | None


def heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """x of `layout` as a view [b, heads, length, d]."""
    return x.transpose(0, 1)[None] if layout == "TND" else ops.layouts.to_bnsd(x, layout, heads)


def as_given(x: Tensor, layout: str) -> Tensor:
    """x [b, heads, length, d] in `layout`; a view if the strides allow it."""
    return x[0].transpose(0, 1) if layout == "TND" else ops.layouts.from_bnsd(x, layout)


def readable(x: Tensor) -> Tensor:
    """x with adjacent channels and 16-byte aligned rows, as torch's attention kernels require; copied if necessary."""
    lanes = 16 // x.element_size()
    aligned = x.stride(-1) == 1 and all(s % lanes == 0 for s in x.stride()[:-1])
    # Not .contiguous(), which returns x itself if only its first element is not on the boundary.
    return x if aligned and (x.is_meta or x.data_ptr() % 16 == 0) else x.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def ordered_sums() -> Iterator[None]:
    """A context in which torch's backward kernels sum in a fixed order (otherwise they use atomics), if the backend has
    the option deterministic.

    It must enclose only the call of such a kernel, because matrix products raise in it unless CUBLAS_WORKSPACE_CONFIG
    is set.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not launch.deterministic or before == (True, False):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def sixteen_bit(request: Request, name: str) -> list[str]:
    """The refusals common to torch's flash and cuDNN kernels."""
    spec, refusals = request.spec, []
    if request.dtype not in (torch.bfloat16, torch.float16):
        refusals.append(f"dtype {request.dtype} ({name} takes bfloat16 and float16)")
    if request.mask is not None:
        refusals.append(f"a mask tensor ({name} takes windows only)")
    return [*refusals, *fused(spec, name)]


def fused(spec: AttentionSpec, name: str) -> list[str]:
    """The refusals common to all fused kernels of torch: HAL's dropout bits, and scales that are not positive."""
    refusals = []
    if spec.dropout_p > 0.0:
        refusals.append(f"dropout ({name} draws other bits; HAL's are the same on every backend)")
    if spec.scale <= 0.0:
        refusals.append(
            f"scale {spec.scale:g} ({name} takes the maximum before it scales, so the scale must be positive)"
        )
    return refusals


def negative_window(spec: AttentionSpec, name: str) -> list[str]:
    sides = [("pre_tokens", spec.pre), ("next_tokens", spec.next)]
    return [f"{side}={n} ({name} reads a negative side as unbounded)" for side, n in sides if n is not None and n < 0]


def register(
    id: str,
    *,
    refuse: Callable[[Request], Sequence[str]],
    forward: Forward,
    backward: Backward | None,
    nondeterministic: str = "",
    takes: Collection[str] = (),
) -> None:
    """Registers an implementation of flash_attention.

    forward(spec, q, k, v, given) -> (out, lse, saved), where lse has to be right only if given.lse.
    backward(spec, saved, dout) -> (dq, dk, dv), and the gradients of bias and sinks if it takes them. Without backward,
    `forward` is differentiable by torch. takes: see AttentionSpec.refusals.
    """
    without = {"bias", "sinks"}.difference(takes)

    def why_not(call: Call) -> Sequence[str]:
        request = Request(attention_spec(call), call.q.dtype, call.mask)
        return [*reasons(call.q, call.k, call.v), *request.spec.refusals(id, takes), *refuse(request)]

    @with_signature_of(ops.flash_attention, without=without, spec=attention_spec)
    def run(
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        return_lse: bool,
        alibi_slopes: Tensor | None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        q_BNQD = heads_first(q, spec.layout, spec.heads)
        k_BGKD, v_BGKE = (heads_first(x, spec.layout, spec.kv_heads) for x in (k, v))
        given = Given(mask, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, sinks, return_lse)
        if q.numel() and k.numel():
            out, lse, saved = forward(spec, q_BNQD, k_BGKD, v_BGKE, given)
            saved = (True, *saved)
        else:
            # An empty sum is 0. The product keeps the graph connected where torch differentiates the implementation.
            out = q_BNQD * 0.0 if backward is None else q_BNQD.new_zeros((*q_BNQD.shape[:-1], spec.dv))
            lse = torch.full(q_BNQD.shape[:-1], -math.inf, dtype=torch.float32, device=q.device)
            if sinks is not None:
                lse = lse.copy_(sinks[:, None])
            saved = (
                False,
                q_BNQD,
                k_BGKD,
                v_BGKE,
                *(x for name, x in (("bias", bias), ("sinks", sinks)) if name in takes),
            )
        lse = lse.detach()  # lse carries no gradient, see ops.flash_attention
        result: Any = as_given(out, spec.layout)
        if return_lse:
            result = result, lse[0] if spec.packed else lse
        return result if backward is None else (result, (spec, *saved))

    def bwd(residuals: tuple[Any, ...], dout: Tensor) -> tuple[Tensor | None, ...]:
        spec, ran, *saved = residuals
        if ran:
            assert backward is not None
            grads: Sequence[Tensor | None] = backward(spec, saved, heads_first(dout, spec.layout, spec.heads))
        else:
            grads = [None if x is None else torch.zeros_like(x) for x in saved]
        dq, dk, dv, *others = grads
        return *(as_given(g, spec.layout) for g in (dq, dk, dv) if g is not None), *others

    differentiated = None if backward is None else bwd
    Cuda.impl(
        ops.flash_attention, id=id, why_not=why_not, bwd=differentiated, version=2, nondeterministic=nondeterministic
    )(run)
