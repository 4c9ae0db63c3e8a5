"""One row per op, implementation and direction: calls, time, bytes, operations, and the share of the roofline.

The roofline (Williams et al., 2009) of a call is the longer of its operations at the device's rate of products and its
bytes at its rate of copies. A share above 1 means that data came from a cache, or that the copy rate is not the bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..spans import Span
from .ceilings import Ceilings


def rows(
    recorded: Sequence[Span],
    refusals: Mapping[tuple[str, str], Mapping[str, str]],
    ceilings: Ceilings | None = None,
) -> list[dict[str, Any]]:
    """Rows with the keys op, implementation, direction, calls, seconds, flops, bytes, refused (id -> reason, of the
    implementations that come before this one) and, with ceilings, bound ("products" or "memory") and roofline (its
    seconds at the ceilings / its seconds; None where the dtype's rate is not known). The longest time is first."""
    sums: dict[tuple[str, str, str], dict[str, Any]] = defaultdict(
        lambda: {"calls": 0, "seconds": 0.0, "flops": 0.0, "bytes": 0, "products": 0.0, "memory": 0.0, "known": True}
    )
    for span in recorded:
        if span.kind != "op":
            continue
        facts = span.facts
        row = sums[span.name, facts["impl"], facts["direction"]]
        row["calls"] += not facts.get("part")
        row["seconds"] += span.seconds
        row["flops"] += facts["flops"]
        row["bytes"] += facts["bytes"]
        if ceilings is not None:
            rate = ceilings.products.get(facts["dtype"])
            products = 0.0 if not facts["flops"] else facts["flops"] / rate if rate else None
            memory = facts["bytes"] / ceilings.copy
            row["known"] &= products is not None
            kind = "products" if (products or 0.0) > memory else "memory"
            row[kind] += max(products or 0.0, memory)
    done = []
    for (op, impl, direction), row in sums.items():
        products, memory, known = row.pop("products"), row.pop("memory"), row.pop("known")
        row |= {"op": op, "implementation": impl, "direction": direction, "refused": dict(refusals.get((op, impl), {}))}
        if ceilings is not None:
            row["bound"] = "products" if products > memory else "memory"
            row["roofline"] = (products + memory) / row["seconds"] if known and row["seconds"] else None
        done.append(row)
    return sorted(done, key=lambda row: -row["seconds"])


def table(of: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned text."""
    total = sum(row["seconds"] for row in of) or 1.0
    lines = [
        f"{'op':<26}{'implementation':<26}{'pass':<10}{'calls':>7}{'ms':>11}{'share':>8}{'GFLOP/s':>10}{'GB/s':>8}"
    ]
    for row in of:
        seconds = row["seconds"] or 1e-9
        lines.append(
            f"{row['op']:<26}{row['implementation']:<26}{row['direction']:<10}{row['calls']:>7}"
            f"{1e3 * row['seconds']:>11.3f}{row['seconds'] / total:>8.1%}"
            f"{row['flops'] / seconds / 1e9:>10.1f}{row['bytes'] / seconds / 1e9:>8.1f}"
        )
    return "\n".join(lines)


def blocked_seconds(recorded: Sequence[Span]) -> float:
    """The time that this rank's threads spent in collectives, or waiting for some that had been started."""
    return sum(span.seconds for span in recorded if span.kind == "communication" and span.facts["part"] != "start")
