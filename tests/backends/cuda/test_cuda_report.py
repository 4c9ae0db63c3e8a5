"""The page of the kernels' resources and estimated rates."""

from __future__ import annotations

import pytest

from hal.backends.cuda import compile, machine_code, report
from hal.backends.cuda.machine_code import BALANCE, Cost, Streaming


@pytest.mark.parametrize(
    "registers, found, cell",
    [
        (32, Cost(100.0, 4), "100, 40%; 4; 100%"),
        (32, Cost(400.0, 4), "400, 161%; 4; 50%"),  # instructions limit it
        (128, Cost(100.0, 1), "100, 40%; 1; 72%"),  # 512 threads with 16 bytes under way
    ],
)
def test_a_rate_is_limited_by_instructions_or_by_loads_in_flight(
    monkeypatch: pytest.MonkeyPatch, registers: int, found: Cost, cell: str
) -> None:
    monkeypatch.setattr(machine_code, "STREAMING", (Streaming("k", 32, (1,)),))
    monkeypatch.setattr(machine_code, "cost", lambda *args: found)
    results = [
        (a, compile.Compiled(b"", {"k": "_Zk"}, (compile.Usage("k", a, registers, 0, 0, 0, 0),))) for a in BALANCE
    ]
    page = report.markdown(results, "13.0")
    (row,) = [line for line in page.splitlines() if line.startswith("| `k` |") and ";" in line]
    assert row.split(" | ")[2] == cell
