"""The order in which attention's implementations are tried, by kind of device and class of call: attention_order.json.

"measured" holds, by device name as torch reports it, what `make gpu` has measured on such a device, and "estimated", by
architecture, what holds for other devices. The file is data: it takes no part in the digest of a report of `make gpu`,
so that following a report's advice does not make that report stale.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hal import Call

CLASSES = ("float32", "packed", "few queries", "masked", "square", "window")
"""Classes of calls, in the order of the first that applies: see `class_of`."""

FEW = 16
"""Up to this many queries a call reads keys more than it computes, as in decoding."""


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((Path(__file__).parent / "attention_order.json").read_text())
    return table


def class_of(call: Call) -> str:
    """The class of a call of ops.flash_attention, from metadata only.

    square: as many queries as keys, and no window or a causal one. window: all other calls in 16 bits without a mask.
    """
    q, layout = call.q, call.layout
    if q.dtype == torch.float32:
        return "float32"
    if layout == "TND":
        return "packed"
    at = layout.index("S")
    sq, skv = q.shape[at], call.k.shape[at]
    if sq <= FEW:
        return "few queries"
    if call.mask is not None or call.bias is not None:
        return "masked"
    if sq == skv and call.pre_tokens is None and call.next_tokens in (None, 0):
        return "square"
    return "window"


def orders(device_name: str, architecture: str) -> dict[str, tuple[str, ...]]:
    """By class, the ids of the implementations, best first: measured on devices of this name, or else estimated for the
    architecture ("sm_90"), or for the newest known one that is older."""
    measured = _table()["measured"].get(device_name)
    rows = measured if measured is not None else _table()["estimated"][_known(architecture)]
    return {kind: tuple(rows.get(kind, rows["square"])) for kind in CLASSES}


def _known(architecture: str) -> str:
    known = sorted(_table()["estimated"], key=_number)
    return max((a for a in known if _number(a) <= _number(architecture)), key=_number, default=known[0])


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_") or 0)


def source_for(device_name: str, architecture: str) -> str:
    """The origin of the order for this device, for `hal why`."""
    if device_name in _table()["measured"]:
        return f"measured on {device_name}"
    return f"an estimate for {_known(architecture)}; {device_name} was not measured (`make gpu` does)"
