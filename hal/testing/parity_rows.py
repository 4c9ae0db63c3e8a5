"""The kit's result: one row per op, implementation and dtype, as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATUSES = ("pass", "waived", "declined", "not run", "fail")
NO_IMPLEMENTATION = "no implementation"


@dataclass
class Row:
    """The result for one implementation of one op in one dtype.

    samples: calls that ran and were compared. worst_error_in_tolerances: None if none ran. reasons: why calls were
    declined, or why a waiver is in force. message, code: the description of a failure, and code that reproduces it.
    facts: versions and device, in the row of the probe.
    """

    op: str
    dtype: str
    backend: str
    simulated: bool
    status: str
    samples: int
    worst_error_in_tolerances: float | None
    reasons: list[str] = field(default_factory=list)
    implementation: str | None = None
    message: str = ""
    code: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The row with an infinite error as the string "inf", because JSON cannot represent it as a number."""
        worst = self.worst_error_in_tolerances
        plain = worst if worst is None or worst < float("inf") else "inf"
        row = {**vars(self), "worst_error_in_tolerances": plain}
        return row if self.facts else {k: v for k, v in row.items() if k != "facts"}

    def __str__(self) -> str:
        status = {"fail": "FAIL"}.get(self.status, self.status)
        worst = self.worst_error_in_tolerances
        detail = f"{self.samples:>4} calls" + ("" if worst is None else f", worst {worst:.3g} tolerances")
        if self.status == "declined":
            detail = "; ".join(self.reasons[:3])
        elif self.status == "not run":
            detail += "; not run: " + "; ".join(self.reasons)
        elif self.status == "pass" and self.simulated and self.reasons and self.reasons[0].startswith("stand-in"):
            detail += f"; {self.reasons[0]}"
        elif self.status == "waived":
            detail += "; " + "; ".join(self.reasons)
        line = f"{status:<9}{self.op + ' ':<20}{self.dtype:<10}{self.implementation or '-':<22}{detail}"
        if self.status == "fail":
            line += f"\n    {self.message}"
            if self.code:
                line += "\n    repeat it with:\n" + "\n".join(f"        {part}" for part in self.code.splitlines())
        return line


@dataclass
class Report:
    """All rows of one run of the kit on one backend."""

    backend: str
    simulated: bool
    rows: list[Row] = field(default_factory=list)

    @property
    def failed(self) -> list[Row]:
        return [r for r in self.rows if r.status == "fail"]

    @property
    def missing(self) -> list[str]:
        """Ops without any implementation."""
        return sorted({r.op for r in self.rows if r.reasons == [NO_IMPLEMENTATION]})

    @property
    def not_run(self) -> list[Row]:
        """The rows with mandatory calls of the production tier for which memory was missing."""
        return [r for r in self.rows if r.status == "not run"]

    @property
    def ok(self) -> bool:
        """Whether nothing failed. Declined calls, missing ops and calls that were not run are not failures."""
        return not self.failed

    def summary(self) -> str:
        counts = {s: sum(r.status == s for r in self.rows) for s in STATUSES}
        where = f"{self.backend}{' (simulated)' if self.simulated else ''}"
        text = f"{where}: " + ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        if self.missing:
            text += f"\nno implementation of: {', '.join(self.missing)}"
        return text

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rows), self.summary()])

    def write_json(self, path: str | Path) -> None:
        write_json(path, self.rows)


def write_json(path: str | Path, rows: Iterable[Row]) -> None:
    """The rows as a JSON list."""
    Path(path).write_text(json.dumps([r.as_json() for r in rows], indent=1, allow_nan=False) + "\n", encoding="utf-8")


def shortened(reasons: Sequence[str], limit: int = 12) -> list[str]:
    """The distinct reasons, the most frequent first, at most `limit` of them and a line that counts the rest."""
    distinct = sorted(set(reasons), key=lambda r: (-list(reasons).count(r), r))
    rest = len(distinct) - limit
    return distinct[:limit] + ([f"and {rest} more"] if rest > 0 else [])
