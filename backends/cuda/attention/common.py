"""What the attention implementations share: the call as a value, layouts as views, empty calls, registration.

An implementation sees q [b, n, sq, d], k and v [b, g, skv, d] as views of the caller's tensors (packed sequences have
b = 1 and cu_seqlens), and returns out and lse in that order of dimensions. A call without queries or keys never reaches
it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal import Rng, ops

from .. import launch
from ..device import Cuda
from ..tensors import reasons

Forward = Callable[..., tuple[Tensor, Tensor, tuple[Any, ...]]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Call:
    """The plain values of one call. heads, kv_heads, sq, skv, d: sizes (sq and skv are token counts when packed)."""

    layout: str
    heads: int
    kv_heads: int
    sq: int
    skv: int
    d: int
    pre: int | None
    next: int | None
    scale: float
    dropout_p: float
    rng: Rng | None

    @property
    def packed(self) -> bool:
        return self.layout == "TND"

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def causal(self) -> bool:
        """Only j <= i + skv - sq is visible, and nothing else is asked of the window."""
        return self.pre is None and self.next == 0

    @property
    def unbounded(self) -> bool:
        return self.pre is None and self.next is None


@dataclass(frozen=True)
class Request:
    """What a refusal may look at: the call, its dtype and whether there is a mask."""

    call: Call
    dtype: torch.dtype
    mask: Tensor | None


def call_of(
    q: Tensor,
    k: Tensor,
    layout: str,
    num_heads: int | None,
    num_kv_heads: int | None,
    pre: int | None,
    next: int | None,
    scale: float | None,
    dropout_p: float,
    rng: Rng | None,
) -> Call:
    _, heads, sq, d = ops.layouts.sizes(q, layout, num_heads)
    if layout in ("SBH", "BSH"):
        kv_heads = num_kv_heads or heads
    else:
        kv_heads = k.shape[layout.index("N")]
    skv = k.shape[layout.index("T" if layout == "TND" else "S")]
    used = 1.0 / math.sqrt(d) if scale is None else float(scale)
    return Call(layout, heads, kv_heads, sq, skv, d, pre, next, used, dropout_p if rng is not None else 0.0, rng)


def heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """[b, heads, length, d], a view."""
    return x.transpose(0, 1)[None] if layout == "TND" else ops.layouts.to_bnsd(x, layout, heads)


def as_given(x: Tensor, layout: str) -> Tensor:
    """[b, heads, length, d] in `layout`; a view where strides allow."""
    return x[0].transpose(0, 1) if layout == "TND" else ops.layouts.from_bnsd(x, layout)


def readable(x: Tensor) -> Tensor:
    """x as torch's attention kernels read it: channels side by side, every row on a 16-byte boundary. Copies if not."""
    lanes = 16 // x.element_size()
    good = x.stride(-1) == 1 and all(s % lanes == 0 for s in x.stride()[:-1])
    # Not .contiguous(), which returns x itself when only its first element is off the boundary.
    return x if good and (x.is_meta or x.data_ptr() % 16 == 0) else x.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def ordered_sums() -> Iterator[None]:
    """Has torch's backward kernels add in a fixed order, if the backend was made so (they use atomics otherwise).

    Only for the call of such a kernel: products of matrices raise in here unless CUBLAS_WORKSPACE_CONFIG is set.
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
    """The refusals that torch's flash and cuDNN kernels share."""
    call, found = request.call, []
    if request.dtype not in (torch.bfloat16, torch.float16):
        found.append(f"dtype {request.dtype} ({name} takes bfloat16 and float16)")
    if request.mask is not None:
        found.append(f"a mask tensor ({name} takes windows only)")
    return [*found, *fused(call, name)]


def fused(call: Call, name: str) -> list[str]:
    """The refusals of every kernel of torch: HAL's dropout bits, and scales that their running maximum cannot take."""
    found = []
    if call.dropout_p > 0.0:
        found.append(f"dropout ({name} draws bits of its own; HAL's are the same on every backend)")
    if call.scale <= 0.0:
        found.append(f"scale {call.scale:g} ({name} takes the maximum before it scales, so the scale must be positive)")
    return found


def negative_window(call: Call, name: str) -> list[str]:
    sides = [("pre_tokens", call.pre), ("next_tokens", call.next)]
    return [f"{side}={n} ({name} reads a negative side as unbounded)" for side, n in sides if n is not None and n < 0]


def register(
    id: str, *, refuse: Callable[[Request], Sequence[str]], forward: Forward, backward: Backward | None
) -> None:
    """Registers an implementation of flash_attention.

    forward(call, q, k, v, mask, cu_q, cu_k) -> (out, lse, saved); backward(call, saved, dout) -> (dq, dk, dv). Without
    backward, `forward` is differentiable by torch.
    """

    def why_not(
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
        call = call_of(q, k, layout, num_heads, num_kv_heads, pre_tokens, next_tokens, scale, dropout_p, rng)
        return [*reasons(q, k, v), *refuse(Request(call, q.dtype, mask))]

    def run(
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
    ) -> Any:
        call = call_of(q, k, layout, num_heads, num_kv_heads, pre_tokens, next_tokens, scale, dropout_p, rng)
        q_BNQD = heads_first(q, layout, call.heads)
        k_BGKD, v_BGKD = (heads_first(x, layout, call.kv_heads) for x in (k, v))
        if q.numel() and k.numel():
            out, lse, saved = forward(call, q_BNQD, k_BGKD, v_BGKD, mask, cu_seqlens_q, cu_seqlens_k)
            saved = (True, *saved)
        else:
            # A sum over nothing is 0, also for autograd where there is no backward of ours.
            out = q_BNQD * 0.0 if backward is None else torch.zeros_like(q_BNQD)
            lse = torch.full(q_BNQD.shape[:-1], -math.inf, dtype=torch.float32, device=q.device)
            saved = (False, q_BNQD, k_BGKD, v_BGKD)
        lse = lse.detach()
        result: Any = as_given(out, layout)
        if return_lse:
            result = result, lse[0] if call.packed else lse
        return result if backward is None else (result, (call, *saved))

    def bwd(residuals: tuple[Any, ...], dout: Tensor) -> tuple[Tensor, ...]:
        call, ran, *saved = residuals
        if ran:
            assert backward is not None
            grads: Sequence[Tensor] = backward(call, saved, heads_first(dout, call.layout, call.heads))
        else:
            grads = [torch.zeros_like(x) for x in saved]
        return tuple(as_given(g, call.layout) for g in grads)

    Cuda.impl(ops.flash_attention, id=id, why_not=why_not, bwd=None if backward is None else bwd)(run)
