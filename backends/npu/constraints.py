"""What Ascend's operators accept: constraints.csv, which the simulator enforces and the backend's refusals read.

Each line names its document in the vendor's repositories. Where documents differ, the stricter value is used, so that a
call that the backend makes is accepted whichever of them is right.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("constraints.csv")


@dataclass(frozen=True)
class Constraint:
    """One line: `value` by kind: a range "least..most", words (shapes, dtypes or modes that are accepted), or a rule.

    code: the library's error code for a call that violates it.
    """

    id: str
    operator: str
    kind: str
    value: str
    code: int
    source: str

    @property
    def least(self) -> int:
        """The smallest number of a range."""
        return int(self.value.split("..")[0])

    @property
    def most(self) -> int:
        """The largest number of a range."""
        return int(self.value.split("..")[1])

    def refusal(self, what: str, n: int) -> list[str]:
        """The reason why `n` of `what` are refused; empty if they are accepted."""
        return [f"{n} {what} ({self.operator} takes up to {self.most})"] if n > self.most else []


def _read() -> dict[str, Constraint]:
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    rows = csv.DictReader(lines)
    return {
        r["id"]: Constraint(r["id"], r["operator"], r["kind"], r["value"], int(r["code"]), r["source"]) for r in rows
    }


CONSTRAINTS = _read()
"""Id -> constraint."""
