"""What HAL adds to a call: an op called through the registry against its implementation called directly.

The implementations do nothing, so the difference is the dispatcher alone: checking the contract, asking why_not, and
forwarding the arguments. The goal is 1 us per call (ARCHITECTURE's budget); the row's ratio is budget / overhead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hal
from hal import ops

from .engine import Row, interleave

BUDGET = 1e-6
_FLOATS = {torch.float32, torch.bfloat16}


class Idle(hal.Backend):
    """A backend whose ops return an input, so that nothing but the dispatch is left to measure."""

    name = "idle"

    def probe(self) -> hal.Probe:
        return hal.Probe(True, 1, "does nothing")

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> hal.Comm:
        return hal.Solo()


def _why_swiglu(x, bias=None):  # type: ignore[no-untyped-def]
    return () if x.dtype in _FLOATS and x.is_cpu else ("dtype",)


def _why_rms_norm(x, weight, eps=1e-5):  # type: ignore[no-untyped-def]
    return () if x.dtype in _FLOATS and x.is_cpu else ("dtype",)


def _why_layer_norm(x, weight, bias, eps=1e-5):  # type: ignore[no-untyped-def]
    return () if x.dtype in _FLOATS and x.is_cpu else ("dtype",)


@Idle.impl(ops.swiglu, id="idle", why_not=_why_swiglu)
def swiglu(x, bias=None):  # type: ignore[no-untyped-def]
    return x


@Idle.impl(ops.rms_norm, id="idle", why_not=_why_rms_norm)
def rms_norm(x, weight, eps=1e-5):  # type: ignore[no-untyped-def]
    return x


@Idle.impl(ops.layer_norm, id="idle", why_not=_why_layer_norm)
def layer_norm(x, weight, bias, eps=1e-5):  # type: ignore[no-untyped-def]
    return x


@Idle.impl(ops.flash_attention, id="idle")
def flash_attention(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    *,
    layout,
    num_heads=None,
    num_kv_heads=None,
    pre_tokens=None,
    next_tokens=None,
    mask=None,
    scale=None,
    dropout_p=0.0,
    rng=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    return_lse=False,
):
    return q


def _repeat(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], None]:
    """1000 calls, so that the measuring loop itself does not count."""

    def run() -> None:
        for _ in range(1000):
            function(*args, **kwargs)

    return run


def run() -> list[Row]:
    """One row per op: how often its overhead fits into the budget (goal 1.0)."""
    x, w, q = torch.randn(4, 8), torch.randn(8), torch.randn(4, 2, 8)
    band = {"layout": "SBH", "num_heads": 2, "next_tokens": 0}
    calls: list[tuple[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (ops.swiglu, swiglu, (x,), {}),
        (ops.rms_norm, rms_norm, (x, w), {}),
        (ops.layer_norm, layer_norm, (x, w, w), {}),
        (ops.flash_attention, flash_attention, (q, q, q), band),
    ]
    rows = []
    with hal.activated(Idle()):
        for op, direct, args, kwargs in calls:
            samples, clean = interleave(
                {"op": _repeat(op, *args, **kwargs), "direct": _repeat(direct, *args, **kwargs)}
            )
            overheads = sorted((s["op"] - s["direct"]) / 1000 for s in samples)
            overhead = statistics.median(overheads)
            rows.append(
                Row(
                    name="dispatch",
                    shape=op.name,
                    peer="budget of 1 us over a direct call",
                    ratio_median=BUDGET / overhead,
                    ratio_min=BUDGET / overheads[-1],
                    ratio_max=BUDGET / overheads[0],
                    seconds=overhead,
                    goal=1.0,
                    clean=f"{clean}/9",
                )
            )
    return rows
