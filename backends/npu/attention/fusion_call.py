"""Translates calls of flash_attention to arguments of npu_fusion_attention for which windows are exact.

Arguments that the hardware would ignore (pre/next without a mask) or round to tiles (mode 0) are never passed. `plan`
chooses:
  no window, no mask         no atten_mask at all
  causal                     sparse_mode 3 with the 2048 x 2048 triangle (bottom-right aligned)
  any other window           sparse_mode 4 (band, bottom-right aligned) with the same triangle
  a mask, or a band that     sparse_mode 1 with mask and window in one full mask
  the library refuses
Where rows may have no visible key, inner_precise=2 makes them 0. A bias and ALiBi's slopes are passed to
npu_fusion_attention_v2, which adds them to the scaled scores, as HAL does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import vendor_rng


@dataclass(frozen=True)
class Plan:
    """The masking arguments of one call. mask: "none", "triangle" or "full"; dead_rows: some rows may have no visible
    key."""

    mask: str = "none"
    mode: int = 0
    pre: int = 2147483647
    next: int = 2147483647
    dead_rows: bool = False


def plan(sq: int, sk: int, pre: int | None, next: int | None, masked: bool) -> Plan:
    """The plan for which exactly the keys i + d - pre <= j <= i + d + next are visible, d = sk - sq, minus a mask."""
    d = sk - sq
    left = sk if pre is None else min(pre, sk)  # a window of sk reaches from the last query back to the first key
    right = sq if next is None else min(next, sq)
    # A window hides something only if the last query does not see the first key, or the first query not the last key.
    bounded = left < sk - 1 or right < sq - 1
    # Rows without a visible key: windows that end before the first key, begin after the last one, or are empty.
    dead = left < 0 or right + d < 0 or left + right < 0
    if masked or (bounded and not _band_is_accepted(sq, sk, left, right)):
        return Plan("full", 1, dead_rows=True)
    if not bounded:
        return Plan()
    if right == 0 and left >= sk - 1:
        return Plan("triangle", 3, dead_rows=dead)
    return Plan("triangle", 4, left, right, dead_rows=dead)


def _band_is_accepted(sq: int, sk: int, pre: int, next: int) -> bool:
    """Replicates the library's validity check of a band, whose edges it measures from the top left corner."""
    pre, next = pre - (sk - sq), next + (sk - sq)
    if pre < 0 and next < 0:
        return False
    if pre < 0:
        return next >= -pre and -pre < sk
    return next >= 0 or (-next <= pre and -next < sq)


def aligned(pre: int | None, next: int | None, sq: int, sk: int) -> tuple[int | None, int | None]:
    """The window, aligned at the bottom right, that equals (pre, next) aligned at the top left."""
    return None if pre is None else pre + (sk - sq), None if next is None else next - (sk - sq)


def plan_packed(
    q: Sequence[int], k: Sequence[int], pre: int | None, next: int | None, top_left: bool = False
) -> Plan | None:
    """One plan for all packed sequences of these lengths, or None if the library would refuse one of them."""
    if any(a and not b for a, b in zip(q, k)):
        return None
    windows = [(a, b, *(aligned(pre, next, a, b) if top_left else (pre, next))) for a, b in zip(q, k) if a]
    if all(plan(*window, False).mask == "none" for window in windows):
        return Plan()
    if top_left:  # mode 2 is causal from the top left; the library has no band from there
        return Plan("triangle", 2) if next == 0 and (pre is None or pre >= max(q)) else None
    # One triangle or band serves sequences of any length, because both modes align at the bottom right of each
    # sequence.
    left = max(k) if pre is None else pre
    right = max(q) if next is None else next
    # In the TND layout the library refuses rows without a visible key.
    if left < 0 or left + right < 0 or any(a - right > b for a, b in zip(q, k) if a):
        return None
    if right == 0 and left >= max(k):
        return Plan("triangle", 3)
    return Plan("triangle", 4, left, right)


@functools.cache
def accepts(operator: str, argument: str) -> bool:
    """Whether an operator of this release of torch_npu has an argument of this name."""
    schema = getattr(torch.ops.npu, operator).default._schema
    return any(given.name == argument for given in schema.arguments)


def orders_statistics() -> bool:
    """Whether this release of torch_npu can ask for the statistics of packed calls in the order of tokens (not 2.6)."""
    return accepts("npu_fusion_attention", "softmax_layout")


@functools.cache
def triangle(device: torch.device) -> Tensor:
    """The 2048 x 2048 mask of the compressed modes: True above the diagonal."""
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=device), 1)


def full_mask(mask: Tensor | None, band: Tensor | None, batch: int, heads: int, sq: int, sk: int) -> Tensor:
    """mask or band, in a shape that the library takes: [1, 1, sq, sk], [b, 1, sq, sk] or [b, n, sq, sk]."""
    both = mask if band is None else band if mask is None else mask | band
    assert both is not None
    both = both.reshape((1,) * (4 - both.ndim) + tuple(both.shape))
    # The library does not accept [1, n, sq, sk], so a mask per head is expanded over the batch.
    b, n = (batch, heads) if both.shape[1] > 1 else (both.shape[0], 1)
    return both.expand(b, n, sq, sk).contiguous()


@dataclass(frozen=True)
class VendorDropout:
    """Dropout of `count` probabilities with the library's generator (see vendor_rng.py)."""

    p: float
    seed: int
    offset: int
    count: int

    def draw(self, like: Tensor) -> Tensor:
        """The keep bits. The library requires that they come from this generator, with this seed and offset (op-plugin,
        torch_npu-npu_fusion_attention.md, dropout_mask); its backward pass draws them again from both."""
        return vendor_rng.mask(like, self.count, self.p, self.seed, self.offset)


BIAS, SLOPES = 0, 2
"""Values of pse_type: pse is added after the scale; pse are ALiBi's slopes, of which the library forms the bias. (With
its value 1, the only one that npu_fusion_attention has, pse is added before the scale.)"""


@dataclass(frozen=True)
class FusionCall:
    """The arguments of a library call except its tensors; the same for forward and backward. pse_type: BIAS or SLOPES,
    which npu_fusion_attention_v2 takes; None without pse."""

    layout: str
    heads: int
    scale: float
    plan: Plan
    q_ends: tuple[int, ...] = ()
    k_ends: tuple[int, ...] = ()
    low_precision: bool = False
    dropout: VendorDropout | None = None
    pse_type: int | None = None

    def options(self, sinks: Tensor | None) -> dict[str, Any]:
        packed = {"actual_seq_qlen": self.q_ends, "actual_seq_kvlen": self.k_ends, "softmax_layout": "TND"}
        # With a sink, a row without a visible key is 0 by itself.
        dead_rows = self.plan.dead_rows and sinks is None
        pre, next = ("pre_tockens", "next_tockens") if self.pse_type is None else ("pre_tokens", "next_tokens")
        return {
            pre: self.plan.pre,
            next: self.plan.next,
            "sparse_mode": self.plan.mode,
            "inner_precise": 2 if dead_rows else int(self.low_precision),
            **(packed if self.q_ends else {}),
            **({} if sinks is None else {"sink": sinks}),
            **({} if self.pse_type is None else {"pse_type": self.pse_type}),
        }

    def _dropout(self) -> dict[str, Any]:
        d = self.dropout
        return {} if d is None else {"keep_prob": 1.0 - d.p, "seed": d.seed, "offset": d.offset}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        pse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """out, and the softmax's maximum and sum, float32 [b, n, sq, 8] (eight equal columns; [t, n, 8] for TND).

        pse: what pse_type says: a bias [1 or b, n, sq, sk] in q's dtype, or slopes [n] or [b, n] in float32. sinks:
        float32 [n].
        """
        given = {"pse": pse, "atten_mask": mask, "scale": self.scale, **self._dropout(), **self.options(sinks)}
        if self.dropout is not None:
            given["dropout_mask"] = self.dropout.draw(q)
        operator = "npu_fusion_attention" if self.pse_type is None else "npu_fusion_attention_v2"
        results = getattr(torch.ops.npu, operator)(q, k, v, self.heads, self.layout, **given)
        return results[0], results[1], results[2]

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        out: Tensor,
        top: Tensor,
        total: Tensor,
        dy: Tensor,
        pse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv, dpse and dsinks in the shapes of q, k, v, pse and sinks; the other arguments are those of
        `forward` and its results."""
        given = {"pse": pse, "atten_mask": mask, "softmax_max": top, "softmax_sum": total, "attention_in": out}
        given |= {"scale_value": self.scale, **self._dropout(), **self.options(sinks)}
        if self.dropout is not None:
            given |= {"numels": self.dropout.count, "gen_mask_parallel": False}
        operator = "npu_fusion_attention_grad" if self.pse_type is None else "npu_fusion_attention_grad_v2"
        results = getattr(torch.ops.npu, operator)(q, k, v, dy.contiguous(), self.heads, self.layout, **given)
        return *results[:4], results[-1]


def full_bias(bias: Tensor, batch: int, heads: int, sq: int, sk: int) -> Tensor:
    """A bias in a shape that the library takes: no dimension of 1 except the batch."""
    bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    return bias.expand(batch if bias.shape[0] > 1 else 1, heads, sq, sk).contiguous()


def lse_of(top: Tensor, total: Tensor) -> Tensor:
    """log-sum-exp from the library's statistics; a row without a visible key has the lowest float as its maximum."""
    top, total = top[..., 0], total[..., 0]
    return torch.where(top < -3e38, -math.inf, top + total.log())
