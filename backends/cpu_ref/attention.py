"""flash_attention (kernels/flash_attention*): all layouts, through their strides.

Nothing is copied or expanded: the kernel gets element strides for batch, token and head, and reads the mask through
strides too. The one exception is a tensor whose last dimension is not contiguous, which is copied. The output and the
gradients are contiguous, in the layout of the tensors they belong to. The kernel validates cu_seqlens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import hal
from hal import ContractError, Rng, address, ops
from hal.backend_tools import attention_strides, bounded, draw_steps

from .build import ffi, lib
from .device import CpuRef
from .memory import empty, empty_like
from .tensors import CODE, REAL, addresses, parameter, refuses

_Shape = tuple[int, ...]


_PARTS = {torch.bfloat16: "bf16", torch.float64: "f64"}
"""The dtypes whose kernels are not in the core of the kernels."""


@lru_cache
def _add_kind(dtype: torch.dtype) -> None:
    """Has the kernels for this dtype, compiled on their first use on a machine."""
    kind = _PARTS.get(dtype)
    if kind is not None:
        getattr(lib(f"attention_{kind}"), f"hal_flash_attention_add_{kind}")()


def _contiguous_strides(shape: Sequence[int]) -> _Shape:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@lru_cache(maxsize=512)
def _describe(
    layout: str,
    dtype: torch.dtype,
    q: _Shape,
    k: _Shape,
    v: _Shape,
    strides: tuple[_Shape, ...],
    heads: tuple[int | None, int | None],
    sequences: int | None,
    mask: tuple[_Shape, _Shape] | None,
    window: tuple[int | None, int | None],
    scale: float | None,
    dropout_p: float,
    block: tuple[_Shape | None, _Shape | None],
    scores: tuple[float | None, bool, _Shape | None, tuple[_Shape, _Shape] | None],
) -> tuple[Any, _Shape, _Shape]:
    """The kernel's description of a call (struct hal_flash_attention), the shapes of the output and of lse.

    q, k, v: shapes. strides: of q, k, v and, for the backward pass, of the output's gradient. mask: its shape and
    strides. block: the Rng's full_shape and start. scores: softcap, top_left, the shape of the slopes, and shape and
    strides of the bias. Cached, because building the struct takes longer than a short call of the kernel.
    """
    _add_kind(dtype)
    if layout in ("SBH", "BSH"):
        n = heads[0] or 1
        g, d = heads[1] or n, q[2] // n
        e = v[2] // g
        out: _Shape = (*q[:2], n * e)
    else:
        n, g, d, e = q[layout.index("N")], k[layout.index("N")], q[-1], v[-1]
        out = (*q[:-1], e)
    if layout == "TND":
        b, sq, sk = sequences or 0, q[0], k[0]
        lse_shape: _Shape = (n, sq)
    else:
        b, sq, sk = q[layout.index("B")], q[layout.index("S")], k[layout.index("S")]
        lse_shape = (b, n, sq)
    # The output and the gradients are allocated here, contiguous, so their strides follow from the shapes.
    like_q, like_k, like_v, like_out = (
        attention_strides(layout, _contiguous_strides(shape), size)
        for shape, size in ((q, d), (k, d), (v, e), (out, e))
    )
    softcap, top_left, slopes, bias = scores
    all_scores, per_head = (b, n, sq, sk), (b, n)
    threshold = 0
    dropout_index: _Shape = (0, 0, 0, 0)
    if dropout_p > 0.0:
        threshold = hal.dropout_threshold(dropout_p)
        dropout_index = draw_steps(Rng(0, 0, *block), (n, sq, sk) if layout == "TND" else (b, n, sq, sk))
    fields = (
        *(CODE[dtype], b, n, g, sq, sk, d, e),
        *(attention_strides(layout, s, size) for s, size in zip(strides[:3], (d, d, e))),
        *(like_out, _broadcast(mask, all_scores), _broadcast(bias, all_scores)),
        _broadcast(None if slopes is None else (slopes, _contiguous_strides(slopes)), per_head),
        *(bounded(window[0]), bounded(window[1]), int(top_left)),
        1.0 / math.sqrt(d) if scale is None else scale,
        softcap or 0.0,
        *(threshold, 1.0 / (1.0 - dropout_p), dropout_index),
        *((attention_strides(layout, strides[3], e), like_q, like_k, like_v) if len(strides) == 4 else ()),
    )
    return ffi().new("struct hal_flash_attention *", fields), out, lse_shape


def _broadcast(given: tuple[_Shape, _Shape] | None, shape: _Shape) -> _Shape:
    """The strides of a tensor with these (shape, strides) over `shape`: 0 where it is broadcast, or absent."""
    if given is None:
        return (0,) * len(shape)
    return torch.empty_strided(*given, device="meta").expand(shape).stride()


def _rows(x: Tensor) -> Tensor:
    """x with adjacent channels, which is the only requirement of the kernel on the strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _require_done(status: int, cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Raises the exception for the kernel's return value; 0 is success, see flash_attention_api.h."""
    if status == 2:
        assert cu_q is not None and cu_k is not None
        raise ContractError(
            f"flash_attention: expected cu_seqlens rising from 0 to the number of tokens ({q.shape[0]}, {k.shape[0]}); "
            f"found cu_seqlens_q={cu_q.tolist()}, cu_seqlens_k={cu_k.tolist()}"
        )
    if status == 3:
        raise RuntimeError(
            f"flash_attention: the kernels for {q.dtype} were not loaded before the call (see _add_kind)"
        )
    if status:
        raise MemoryError("flash_attention: no memory for the workspace (float copies of keys and values per thread)")


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    rng: tuple[int, int] | None,
    out: Tensor,
    rest: Tensor | None,
    lse: Tensor,
) -> tuple[int, ...]:
    """The arguments that both kernels take after the description. rng: seed and offset."""
    return (
        *(q.data_ptr() or address(q), k.data_ptr() or address(k), v.data_ptr() or address(v)),
        *(address(mask), address(bias), address(slopes), address(sinks), address(cu_q), address(cu_k)),
        *(rng or (0, 0)),
        *(out.data_ptr() or address(out), address(rest), lse.data_ptr() or address(lse)),
    )


def _backward(
    residuals: tuple[Any, ...], dout: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk and dv, like q, k and v, from dout like out; the gradients of bias and sinks if they are needed."""
    *operands, sinks_dtype, call = residuals
    q, k, v, _, bias, _, sinks, cu_q, cu_k, *_, lse = operands
    dout = _rows(dout)
    layout, strides, *others = call
    described, *_ = _describe(layout, q.dtype, q.shape, k.shape, v.shape, (*strides, dout.stride()), *others)
    dq, dk, dv = (
        empty(q.shape, q.dtype),
        empty(k.shape, q.dtype),
        empty(v.shape, q.dtype),
    )
    if not lse.numel():  # without queries or heads, the kernel writes nothing
        dk.zero_()
        dv.zero_()
    dbias = dsinks = None
    if bias is not None and needs[3]:
        sk = k.shape[layout.index("S")]
        dbias = torch.zeros((*lse.shape, sk), dtype=REAL[q.dtype])
    if sinks is not None and needs[4]:
        dsinks = torch.zeros_like(lse)
    status = lib().hal_flash_attention_backward(
        described,
        *_operands(*operands),
        *addresses(dout, dq, dk, dv, dbias, dsinks),
    )
    _require_done(status, cu_q, cu_k, q, k)
    if dbias is not None:
        dbias = dbias.sum_to_size(bias.shape).to(q.dtype)
    if dsinks is not None:
        dsinks = dsinks.sum((0, 2) if dsinks.ndim == 3 else 1).to(sinks_dtype)
    return dq, dk, dv, dbias, dsinks


@CpuRef.impl(
    ops.flash_attention, id="cpu_ref/c", why_not=refuses(ops.flash_attention, "q", "k", "v"), bwd=_backward, version=2
)
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
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    top_left: bool = False,
) -> tuple[Tensor | tuple[Tensor, Tensor], tuple[Any, ...]]:
    q, k, v = _rows(q), _rows(k), _rows(v)
    sequences = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        sequences = cu_seqlens_q.shape[0] - 1
    if rng is None:
        dropout_p = 0.0
    # Everything that _describe depends on, so that it is computed once per kind of call, also for the backward pass.
    call = (
        layout,
        (q.stride(), k.stride(), v.stride()),
        (num_heads, num_kv_heads),
        sequences,
        None if mask is None else (mask.shape, mask.stride()),
        (pre_tokens, next_tokens),
        scale,
        dropout_p,
        (None, None) if rng is None else (rng.full_shape, rng.start),
        (
            softcap,
            top_left,
            None if alibi_slopes is None else alibi_slopes.shape,
            None if bias is None else (bias.shape, bias.stride()),
        ),
    )
    described, out_shape, lse_shape = _describe(layout, q.dtype, q.shape, k.shape, v.shape, *call[1:])
    out, lse = empty(out_shape, q.dtype), torch.empty(lse_shape, dtype=REAL[q.dtype])
    wants_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    sinks_dtype = None
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.contiguous()
    if bias is not None:
        wants_gradient |= bias.requires_grad
    if sinks is not None:
        sinks_dtype, wants_gradient = sinks.dtype, wants_gradient or sinks.requires_grad
        sinks = parameter(sinks, REAL[q.dtype])
    # The rounding error of a 16-bit output, which the backward pass needs for accuracy (see flash_attention_api.h).
    rest = empty_like(out) if wants_gradient and q.dtype in (torch.bfloat16, torch.float16) else None
    state = None if rng is None else (rng.seed, rng.offset)
    operands = (q, k, v, mask, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, state, out, rest, lse)
    status = lib().hal_flash_attention_forward(
        described,
        *_operands(*operands),
    )
    _require_done(status, cu_seqlens_q, cu_seqlens_k, q, k)
    return (out, lse) if return_lse else out, (*operands, sinks_dtype, call)
