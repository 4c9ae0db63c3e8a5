"""Results of the conformance kit from several backends, side by side: op and dtype by backend.

Rows come from `hal parity --json`, also from other machines and environments. A cell sums up all implementations of its
op: it shows the worst status and the worst error, and keeps all rows.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from hal.core.backend import Backend
from hal.core.registry import backend_names, probed
from hal.errors import ContractError
from hal.untrusted import one_line, shown

from .parity_rows import NO_IMPLEMENTATION, STATUSES, Row

PROBE, GOLDEN, LOWERED = "probe", "golden_loss", "hal.lower"
_GRAVITY = ("fail", "not run", "waived", "pass", "declined")
STAND_IN, WAIVER = "stand-in", "waiver x"


@dataclass(frozen=True)
class Column:
    """One backend on its device or on its simulator. absent: why it was not run, or empty."""

    backend: str
    simulated: bool
    facts: dict[str, str]
    absent: str

    @property
    def where(self) -> str:
        return "not run" if self.absent else "simulator" if self.simulated else "device"


@dataclass(frozen=True)
class Cell:
    """A column's result for an op and dtype. status: one of STATUSES, "none" (no implementation) or "" (no row)."""

    status: str
    worst: float | None
    rows: tuple[Row, ...]

    @property
    def stand_in(self) -> bool:
        """Whether only a simulator's stand-ins ran, and no kernel of the backend."""
        ran = [r for r in self.rows if r.samples and r.implementation != LOWERED]
        return bool(ran) and all(r.reasons and r.reasons[0].startswith(STAND_IN) for r in ran)


@dataclass(frozen=True)
class Support:
    """The table. lines: (op, dtype) in the order of the rows; the golden losses come last."""

    columns: tuple[Column, ...]
    lines: tuple[tuple[str, str], ...]
    cells: dict[tuple[str, str, int], Cell]

    def cell(self, line: tuple[str, str], column: int) -> Cell:
        return self.cells.get((*line, column), Cell("", None, ()))

    def failures(self, column: int) -> list[tuple[str, str]]:
        """(what, message) of every failure."""
        rows = [r for line in self.lines for r in self.cell(line, column).rows if r.status == "fail"]
        return [(f"{r.op} {r.dtype} {r.implementation or ''}".strip(), r.message) for r in rows]

    def waivers(self, column: int) -> list[tuple[str, str]]:
        """(what, reason) of every waiver that applies; equal ones of several dtypes are merged."""
        return self._reasons(column, lambda reason: reason.startswith(WAIVER))

    def declines(self, column: int) -> list[tuple[str, str]]:
        """(what, reason) of every kind of call that was declined."""
        others = (WAIVER, STAND_IN, NO_IMPLEMENTATION)
        return self._reasons(column, lambda reason: not reason.startswith(others))

    def stand_ins(self, column: int) -> list[tuple[str, str]]:
        """(what, reason) of every implementation that a simulator replaces by a stand-in."""
        return self._reasons(column, lambda reason: reason.startswith(STAND_IN))

    def missing(self, column: int) -> list[str]:
        """Ops without an implementation."""
        return [op for op in dict.fromkeys(op for op, _ in self.lines) if self._all_none(op, column)]

    def _all_none(self, op: str, column: int) -> bool:
        statuses = {self.cell(line, column).status for line in self.lines if line[0] == op}
        return statuses - {""} == {"none"}

    def _reasons(self, column: int, wanted: Callable[[str], bool]) -> list[tuple[str, str]]:
        dtypes_of: dict[tuple[str, str], dict[str, None]] = {}
        for op, dtype in self.lines:
            for row in self.cell((op, dtype), column).rows:
                for reason in filter(wanted, row.reasons):
                    dtypes_of.setdefault((f"{op} {row.implementation or ''}".strip(), reason), {})[dtype] = None
        return [(f"{what} ({', '.join(dtypes)})", reason) for (what, reason), dtypes in dtypes_of.items()]


def facts(backend: Backend) -> dict[str, str]:
    """Facts about the backend that ran: where its code is from, versions, the device as probed.

    Paths of this machine are left out, since a report is read on other machines.
    """
    import hal

    probe = probed(backend)
    return {
        "distribution": backend_names().get(backend.name, "not installed"),
        "api": str(backend.api),
        "torch-hal": hal.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "probe": probe.reason,
        **{name: value for name, value in probe.facts.items() if not value.startswith("/")},
    }


def absent_row(backend: str, reason: str) -> Row:
    """The row of a backend that could not be run."""
    return Row(PROBE, "-", backend, False, "declined", 0, None, [reason])


def read(path: str | Path) -> list[Row]:
    """The rows that `hal parity --json` wrote. Raises ContractError for a file that holds something else."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        known = {f.name for f in fields(Row)}
        rows = [Row(**{k: v for k, v in item.items() if k in known}) for item in content]
        for row in rows:
            if row.worst_error_in_tolerances is not None:
                row.worst_error_in_tolerances = float(row.worst_error_in_tolerances)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ContractError(
            f"{path} does not hold rows of `hal parity --json`: {one_line(error)}; write it anew"
        ) from None
    for row in rows:
        if row.status not in STATUSES:
            raise ContractError(f"{path}: unknown status {shown(row.status)}; known are {', '.join(STATUSES)}")
    return rows


def table(results: Iterable[Sequence[Row]]) -> Support:
    """The table of several results, one column per backend and kind of device.

    Raises ContractError if two results are about the same backend, since either of them could be the valid one.
    """
    columns: list[Column] = []
    lines: dict[tuple[str, str], None] = {}
    grouped: dict[tuple[str, str, int], list[Row]] = {}
    for rows in results:
        keys = dict.fromkeys((r.backend, r.simulated) for r in rows)
        for key in keys:
            if any((c.backend, c.simulated) == key for c in columns):
                where = "simulator" if key[1] else "device"
                raise ContractError(f"two results are about {key[0]} on its {where}; give one of them")
            own = [r for r in rows if (r.backend, r.simulated) == key]
            probe = next((r for r in own if r.op == PROBE), None)
            why = "; ".join(probe.reasons) if probe is not None and probe.status == "declined" else ""
            columns.append(Column(*key, dict(probe.facts) if probe else {}, why))
            for row in own:
                if row is not probe or row.status == "fail":
                    lines[row.op, row.dtype] = None
                    grouped.setdefault((row.op, row.dtype, len(columns) - 1), []).append(row)
    ops = list(dict.fromkeys(op for op, _ in lines))
    order = sorted(lines, key=lambda line: (line[0] == GOLDEN, ops.index(line[0])))
    return Support(tuple(columns), tuple(order), {key: _cell(rows) for key, rows in grouped.items()})


def _cell(rows: Sequence[Row]) -> Cell:
    if all(r.reasons == [NO_IMPLEMENTATION] for r in rows):
        return Cell("none", None, tuple(rows))
    own = [r for r in rows if r.implementation != LOWERED or r.status == "fail"]
    status = next((s for s in _GRAVITY if any(r.status == s for r in own)), "pass")
    errors = [r.worst_error_in_tolerances for r in own if r.worst_error_in_tolerances is not None]
    return Cell(status, max(errors, default=None), tuple(rows))
