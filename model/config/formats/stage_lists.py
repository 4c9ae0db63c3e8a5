"""Lists with one number for each pipeline stage, in the files of MindSpeed-Core-MS and MindFormers.

With virtual stages such a list has rows. MindSpeed-Core-MS has a row for each rank, with a number for each of its
virtual stages; MindFormers has a row for each round through the ranks. HAL's options have the numbers in the order in
which data pass the stages: the first virtual stage of every rank, then the second, and so on.
"""

from __future__ import annotations

import json
from typing import Any

from hal.untrusted import shown

from .rules import Reading, take


def in_order(reading: Reading, key: str, given: Any, *, rows_are_ranks: bool) -> list[int]:
    """The numbers of a list, or of its rows, in HAL's order. Raises ConfigError."""
    stages = reading.values.get("pipeline_model_parallel_size", 1)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise reading.refuse(key, f"lists of numbers; found {shown(given)}") from None
    nested = isinstance(given, list) and bool(given) and all(isinstance(row, list) for row in given)
    rows = given if nested else [given]
    if not all(isinstance(row, list) and row and all(type(n) is int and n >= 0 for n in row) for row in rows):
        raise reading.refuse(key, f"lists of numbers of layers; found {shown(given)}")
    if not nested:
        return list(given)
    widths = {len(row) for row in rows}
    if len(widths) != 1 or (len(rows) if rows_are_ranks else len(rows[0])) != stages:
        raise reading.refuse(key, f"{len(rows)} rows of {sorted(widths)} for {stages} stages")
    return [n for round_ in (zip(*rows) if rows_are_ranks else rows) for n in round_]


def recomputation(reading: Reading, *, rows_are_ranks: bool, together: bool) -> None:
    """Sets the options for the deferred keys `recompute` and `select_recompute`, each True, False or a list.

    together: the layers that recompute only attention (or other parts) are counted from the first layer on, as are
    those recomputed as a whole, instead of after these.
    """
    whole, whole_key = take(reading, "recompute")
    part, part_key = take(reading, "select_recompute")
    if isinstance(part, dict) or (isinstance(part, list) and part and all(isinstance(x, str) for x in part)):
        reading.note(part_key, "which operators are recomputed changes no result")
        part = None
    for value, key in ((whole, whole_key), (part, part_key)):
        if value is not None and not isinstance(value, (bool, list)):
            raise reading.refuse(key, f"True, False or a list of numbers of layers; found {shown(value)}")
    if whole is True:
        for option, value in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1)):
            reading.set(f"recompute_{option}", value, whole_key)
        return
    counts = in_order(reading, whole_key, whole, rows_are_ranks=rows_are_ranks) if whole else []
    if counts:
        reading.set("recompute_layer_list", [str(n) for n in counts], whole_key)
    if part is True and not counts:
        reading.set("recompute_granularity", "selective", part_key)
    elif part:
        layers = reading.either("num_layers") or 0
        parts = (
            [layers] * len(counts) if part is True else in_order(reading, part_key, part, rows_are_ranks=rows_are_ranks)
        )
        if together and len(counts) == len(parts):
            parts = [max(0, n - before) for n, before in zip(parts, counts)]
        reading.set("select_recompute_layer_list", [str(n) for n in parts], part_key)
