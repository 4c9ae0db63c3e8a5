"""All goals of cpu_ref that `hal bench --check` verifies.

They are for two threads of a current x86-64 server processor. A comparison meets its goal by the ratio (RATIOS) or by a
share of the ceiling that is measured in the same rounds (SHARES), whichever it reaches: a peer's speed varies between
processors for reasons that say nothing of HAL, and no kernel can exceed the ceiling. A goal that depends on an
instruction set or a vendor declares this and applies only there. A goal that could not be measured counts as missed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from . import machine

BACKEND = "cpu_ref"
"""The backend that the goals are for."""


def _avx512() -> bool:
    return "avx512f" in machine.features()


def _bf16() -> bool:
    return "avx512_bf16" in machine.features()


def _amx() -> bool:
    """Of attention, only the products are faster there: it runs at 77 % of their rate at most."""
    return "amx_bf16" in machine.features()


def _slow_mkl() -> bool:
    return machine.vendor() not in ("", "GenuineIntel")


def _fast_mkl() -> bool:
    """Peers multiply at the ceiling's rate there, so that HAL gains only by what it does not compute or store."""
    return machine.vendor() == "GenuineIntel"


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Goal:
    """At least `least` x `peer` (or that share of the ceiling) for cases whose name and shape match (fnmatch).

    holds: whether the goal applies on this machine.
    """

    name: str
    shape: str
    peer: str
    least: float
    allocator: str = "*"
    holds: Callable[[], bool] = _always


_EVEN = [  # the "odd ..." cases of the same ops have 80 % of these goals
    Goal("linear *", "f32 *", "torch.mm", 1.9, holds=_slow_mkl),
    Goal("linear *", "f32 *", "torch.mm", 0.95),
    # Under `default`, eager's page faults would decide the ratio: see the shares.
    Goal("scale_mask_softmax fwd+bwd", "*", "eager", 4.0, "pooled"),
    Goal("cross_entropy fwd+bwd", "*", "eager", 3.0, "pooled"),
    Goal("adamw", "*", "AdamW(fused=True)", 0.95),
]

_SMALL_GROUPS = ("4 rows", "16 rows", "32 rows")

RATIOS = [  # the first one that matches and holds applies
    Goal("attention fwd*", "f32 * S512 * causal", "sdpa", 2.0, holds=_fast_mkl),
    Goal("attention fwd*", "f32 * S1024 * causal", "sdpa", 1.5, holds=_fast_mkl),
    Goal("attention fwd*", "f32 * S512 * causal", "sdpa", 3.3, holds=_avx512),
    Goal("attention fwd*", "f32 * S1024 * causal", "sdpa", 3.3, holds=_avx512),
    Goal("attention fwd*", "f32 * causal", "sdpa", 2.5, holds=_avx512),
    Goal("attention fwd", "bf16 * causal", "sdpa", 1.05, holds=_amx),
    Goal("attention fwd+bwd", "bf16 * causal", "sdpa", 1.5, holds=_amx),
    Goal("attention fwd", "bf16 * causal", "sdpa", 4.5, holds=_bf16),
    Goal("attention fwd+bwd", "bf16 * causal", "sdpa", 3.2, holds=_bf16),
    Goal("attention window *", "f32 * S4096 *", "sdpa-mask", 15.0, holds=_fast_mkl),
    Goal("attention window *", "f32 * S4096 *", "sdpa-mask", 25.0, holds=_avx512),
    Goal("attention window *", "f32 * S4096 *", "sdpa-chunked", 4.0, holds=_avx512),
    Goal("attention window fwd", "f32 * S4096 *", "flex", 2.8, holds=_avx512),
    # Shapes that do not fit the tiles: 80 % of the goals of even shapes.
    Goal("attention odd shapes *", "f32 * S777 *", "sdpa", 0.8 * 3.3, holds=_avx512),
    Goal("attention odd shapes *", "f32 * S4001 *", "sdpa-mask", 0.8 * 25.0, holds=_avx512),
    Goal("attention odd shapes *", "f32 * causal", "sdpa*", 0.8 * 2.5, holds=_avx512),
    Goal("attention one query", "*", "sdpa", 1.0, holds=_avx512),
    Goal("attention memory", "*", "naive", 50.0),
    Goal("growth", "window 256: S", "linear growth", 0.9),
    # 2.0 would mean that the loss needs no buffer besides the logits, but pages of code that the first call touches
    # also count. With a second buffer for the gradient the ratio would be below 1.
    Goal("cross_entropy memory", "*", "two buffers of logits", 1.5),
    *_EVEN,
    *(replace(g, name=f"odd {g.name}", least=0.8 * g.least) for g in _EVEN),
    Goal("moe_router *", "*", "eager", 3.0),
    Goal("grouped_linear *", "f32 32 rows per group, *", "F.linear loop", 1.25, holds=_fast_mkl),
    *(
        Goal("grouped_linear *", f"* {rows} per group, *", "F.linear loop", 1.5, holds=_avx512)
        for rows in _SMALL_GROUPS
    ),
    Goal("grouped_linear *", "*", "F.linear loop", 0.95),
    Goal("grouped_linear fwd", "* 64 rows per group, *", "oneDNN", 0.85),
    Goal("grouped_linear fwd", "* 256 rows per group, *", "oneDNN", 0.85),
    Goal("dispatch", "* autograd, *", "torch.library", 1.5),
    Goal("dispatch", "*", "torch.library", 4.0),
    Goal("all_reduce", "1 KB", "gloo", 50.0),
    Goal("all_reduce", "1 MB", "gloo", 6.0),
    Goal("all_reduce", "64 MB", "gloo", 6.0),
    # The formulas of `hal plan` may overestimate, which leaves memory unused. If one underestimated, a planned run
    # would not fit.
    Goal("weights between steps", "*", "formula", 0.99),
    Goal("gradients between steps", "*", "formula", 0.99),
    Goal("optimizer between steps", "*", "formula", 0.99),
    Goal("activations of a microbatch", "*", "formula", 0.99),
    Goal("peak of a step", "*", "formula", 0.94),
    Goal("bytes sent to experts in a step", "*", "formula", 0.999),
    Goal("bubble", "*", "formula", 0.999),
    Goal("training step", "f32 *", "eager", 2.0, "default", holds=_avx512),
    Goal("training step", "f32 *", "tuned *", 1.15, "pooled", holds=_avx512),
    Goal("training step", "bf16 *", "eager", 1.6, "default", holds=_bf16),
    Goal("training step", "bf16 *", "tuned *", 1.4, "pooled", holds=_bf16),
    Goal("training memory", "*", "eager", 1.0),
    Goal("transformers *", "f32 * V8192", "eager", 1.15, holds=_fast_mkl),
    Goal("transformers *", "f32 * V8192", "eager", 1.5, holds=_avx512),
    Goal("transformers *", "f32 * V8192", "compile", 1.1, holds=_avx512),
    Goal("transformers *", "*", "*", 0.95),
    Goal("memory at step 1,000", "*", "101 % of step 100", 1.0),
]

_FUSED = (
    *("scale_mask_softmax fwd+bwd", "cross_entropy fwd+bwd", "layer_norm fwd+bwd", "rms_norm fwd+bwd"),
    *("swiglu fwd+bwd", "rotary fwd"),
)

SHARES = [  # `peer` is the ceiling's name
    # Between processors that share no cache, all data is also written to memory and read again, at half the rate.
    Goal("all_reduce", "64 MB", "copy", 0.8 * 0.5),
    Goal("permute", "*", "copy", 0.8),
    Goal("unpermute", "*", "copy", 0.8),
    # Short sequences spend a larger part of the time on packing and on tiles at the edge of the mask.
    Goal("attention fwd*", "f32 * S512 * causal", "GEMM f32", 0.80, holds=_avx512),
    Goal("attention fwd*", "f32 * causal", "GEMM f32", 0.85, holds=_avx512),
    # A query's keys are few in a window, like those in a short sequence.
    Goal("attention window *", "f32 * S4096 *", "GEMM f32", 0.80, holds=_avx512),
    Goal("attention odd shapes *", "f32 * S777 *", "GEMM f32", 0.8 * 0.80, holds=_avx512),
    Goal("attention odd shapes *", "f32 * causal", "GEMM f32", 0.8 * 0.85, holds=_avx512),
    # A single query reads all keys and values and computes little.
    Goal("attention one query", "*", "copy", 0.80, holds=_avx512),
    Goal("attention fwd*", "bf16 * S512 * causal", "GEMM bf16", 0.80, holds=_bf16),
    Goal("attention fwd*", "bf16 * causal", "GEMM bf16", 0.85, holds=_bf16),
    Goal("linear *", "f32 *", "GEMM f32", 0.90),
    Goal("training step", "f32 *", "GEMM f32", 0.80, holds=_avx512),
    Goal("training step", "bf16 *", "GEMM bf16", 0.72, holds=_bf16),
    Goal("transformers *", "f32 * V8192", "GEMM f32", 0.85, holds=_avx512),
    *(Goal(f"{odd}{name}", "*", "copy", 0.85, "default") for name in _FUSED for odd in ("", "odd ")),
    *(Goal(f"{odd}{name}", "*", "copy", 0.85, "pooled") for name in _FUSED[:2] for odd in ("", "odd ")),
]


def _find(goals: list[Goal], name: str, shape: str, peer: str, allocator: str) -> float | None:
    for g in goals:
        pairs = ((name, g.name), (shape, g.shape), (peer, g.peer), (allocator, g.allocator))
        if all(fnmatchcase(value, pattern) for value, pattern in pairs) and g.holds():
            return g.least
    return None


def ratio(name: str, shape: str, peer: str, allocator: str) -> float | None:
    """The ratio required of this comparison, or None."""
    return _find(RATIOS, name, shape, peer, allocator)


def share(name: str, shape: str, ceiling: str, allocator: str) -> float | None:
    """The share of the ceiling required of this case, or None."""
    return _find(SHARES, name, shape, ceiling, allocator)
