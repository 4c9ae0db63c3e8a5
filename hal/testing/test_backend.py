"""Collected by `pytest --pyargs hal.testing --backend NAME`: one test per op and implementation (see plugin.py)."""

from collections.abc import Callable, Iterable

import pytest

from .parity_rows import Row


def test_conformance(hal_case: Callable[[], Iterable[Row]], hal_rows: list[Row]) -> None:
    rows = list(hal_case())
    hal_rows.extend(rows)
    failed = [row for row in rows if row.status == "fail"]
    if failed:
        pytest.fail("\n".join(map(str, failed)), pytrace=False)
    if all(row.status == "declined" for row in rows):
        pytest.skip("; ".join(dict.fromkeys(reason for row in rows for reason in row.reasons)))
