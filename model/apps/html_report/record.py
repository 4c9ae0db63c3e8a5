"""run.json and parity files, read as data of unknown origin: checked, and never more of them than was asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ConfigError

_MOST, _LEAST = 1e100, 1e-100
"""Charts can still calculate with numbers in between; larger ones are gaps, smaller ones 0."""

Rows = list[tuple[int, float]]
"""(iteration, value), by iteration."""


@dataclass(frozen=True)
class Run:
    """What a run left. Curves by iteration; gaps where a value was not finite or a step was skipped."""

    name: str
    config: dict[str, Any]
    versions: dict[str, Any]
    device: dict[str, Any]
    fallbacks: dict[str, int]
    losses: Rows
    grad_norms: Rows
    evaluations: Rows
    step_seconds: Rows
    tokens_per_second: float | None
    model_flops_per_second: float | None
    peak_memory_bytes: float | None

    @property
    def backend(self) -> str:
        """The backend's name, marked if it was simulated."""
        return f"{self.device.get('backend', '?')}{' (simulated)' if self.device.get('simulated') else ''}"

    @property
    def throughput(self) -> Rows:
        """Tokens per second of each step."""
        batch, length = self.config.get("global_batch_size"), self.config.get("seq_length")
        if not (isinstance(batch, int) and isinstance(length, int) and 0 < batch * length < 1 << 62):
            return []
        return [(n, batch * length / s) for n, s in self.step_seconds if s > _LEAST]


@dataclass(frozen=True)
class Parity:
    """Results of the conformance kit: rows of `hal parity --json`."""

    source: str
    rows: list[dict[str, Any]] = field(default_factory=list)


def read_runs(places: list[Path]) -> list[Run]:
    """The runs of folders (or of run.json files), with names that tell them apart. Raises ConfigError."""
    files = [p / "run.json" if p.is_dir() else p for p in places]
    names = _names([f.parent if f.name == "run.json" else f for f in files])
    return [_run(file, name) for file, name in zip(files, names)]


def read_parity(path: Path) -> Parity:
    """Raises ConfigError for a file that is no list of rows with op, dtype, backend and status."""
    rows = _json(path)
    needed = {"op", "dtype", "backend", "status"}
    if not isinstance(rows, list) or not all(isinstance(r, dict) and needed <= set(r) for r in rows):
        raise ConfigError(f"{path} is no result of `hal parity --json`")
    return Parity(path.name, rows)


def _names(places: list[Path]) -> list[str]:
    """As few of a path's last parts as tell it from the others."""
    parts = [p.absolute().parts for p in places]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"the same run is given twice: {', '.join(map(str, places))}")


def _run(path: Path, name: str) -> Run:
    record = _json(path)
    if not isinstance(record, dict):
        raise ConfigError(f"{path} is no run's record: it holds no JSON object")
    tables = {key: record.get(key, {}) for key in ("config", "versions", "device", "fallbacks")}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path} is no run's record: {key} is no table")
    curves = {key: _rows(path, key, record.get(key, [])) for key in ("losses", "grad_norms", "evaluations")}
    numbers = ("tokens_per_second", "model_flops_per_second", "peak_memory_bytes")
    return Run(
        name,
        **tables,
        **curves,
        step_seconds=_rows(path, "step_seconds", record.get("step_seconds", [])),
        **{key: _number(record.get(key)) for key in numbers},
    )


def _rows(path: Path, key: str, rows: Any) -> Rows:
    good = isinstance(rows, list) and all(
        isinstance(r, list) and len(r) == 2 and isinstance(r[0], int) and not isinstance(r[0], bool) for r in rows
    )
    if not good:
        raise ConfigError(f"{path} is no run's record: {key} should be a list of [iteration, value]")
    for n, _ in rows:
        if not 0 <= n < 1 << 53:
            said = n if abs(n) < 1 << 62 else f"of {n.bit_length()} bits"
            raise ConfigError(f"{path} is no run's record: {key} has an iteration {said}")
    known = [(n, _number(value)) for n, value in rows]
    return sorted((n, value) for n, value in known if value is not None)


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _MOST:
        return None
    return float(value) if abs(value) > _LEAST else 0.0


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        hint = "; give the folder of a run (its --run-dir)" if isinstance(error, OSError) else ""
        raise ConfigError(f"{path} cannot be read: {error}{hint}") from None
