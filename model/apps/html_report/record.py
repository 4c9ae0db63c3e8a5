"""Reads run.json and parity files, which are not trusted: their structure and numbers are checked."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.schema import ConfigError
from .profile import Profile, read_profiles

_MOST, _LEAST = 1e100, 1e-100
"""Bounds of a number's magnitude that keep charts from overflowing. Larger numbers are gaps, smaller ones are 0."""

Rows = list[tuple[int, float]]
"""Pairs of iteration and value, sorted by iteration."""


@dataclass(frozen=True)
class Run:
    """The record of a run. Curves have gaps where a value was not finite or a step was skipped."""

    name: str
    config: dict[str, Any]
    versions: dict[str, Any]
    device: dict[str, Any]
    fallbacks: dict[str, int]
    losses: Rows
    grad_norms: Rows
    evaluations: Rows
    step_seconds: Rows
    expert_imbalance: Rows
    router_entropy: Rows
    tokens_per_second: float | None
    model_flops_per_second: float | None
    peak_memory_bytes: float | None
    tokenizer: str
    bytes_per_token: float | None
    profiles: tuple[Profile, ...] = ()

    @property
    def bits_per_nat(self) -> float:
        """Bits per byte of text that correspond to one nat per token, where the bytes of a token are known."""
        return 1.0 / (math.log(2.0) * (self.bytes_per_token or 1.0))

    @property
    def bits_per_byte(self) -> tuple[Rows, Rows] | None:
        """Losses and validation losses in bits per byte of text; None if the bytes of a token are not known."""
        if not self.bytes_per_token:
            return None
        factor = self.bits_per_nat
        losses, evaluations = ([(n, y * factor) for n, y in rows] for rows in (self.losses, self.evaluations))
        return losses, evaluations

    @property
    def backend(self) -> str:
        """The backend's name, marked if it was simulated."""
        return f"{self.device.get('backend', '?')}{' (simulated)' if self.device.get('simulated') else ''}"

    @property
    def last_loss(self) -> float | None:
        """The mean of the last ten iterations."""
        return statistics.fmean(loss for _, loss in self.losses[-10:]) if self.losses else None

    @property
    def fallback_calls(self) -> int:
        """Calls that ran the reference in place of a kernel."""
        return sum(count for count in self.fallbacks.values() if isinstance(count, int))

    @property
    def throughput(self) -> Rows:
        """Tokens per second of each step."""
        batch, length = self.config.get("global_batch_size"), self.config.get("seq_length")
        if not (isinstance(batch, int) and isinstance(length, int) and 0 < batch * length < 1 << 62):
            return []
        return [(n, batch * length / s) for n, s in self.step_seconds if s > _LEAST]


@dataclass(frozen=True)
class Parity:
    """Results of the conformance kit: rows of `hal parity --json`, with all the keys that the page shows."""

    source: str
    rows: list[dict[str, Any]]

    @property
    def counts(self) -> Counter[str]:
        """The number of rows per status."""
        return Counter(str(row["status"]) for row in self.rows)


def read_runs(places: list[Path]) -> list[Run]:
    """The runs in folders (or run.json files), with names that distinguish them. Raises ConfigError."""
    files = [p / "run.json" if p.is_dir() else p for p in places]
    names = _names([f.parent if f.name == "run.json" else f for f in files])
    return [_run(file, name) for file, name in zip(files, names)]


def read_parity(path: Path) -> Parity:
    """The rows of a file. Raises ConfigError unless it is a list of rows with op, dtype, backend and status."""
    rows = _json(path)
    needed = {"op", "dtype", "backend", "status"}
    if not isinstance(rows, list) or not all(isinstance(r, dict) and needed <= set(r) for r in rows):
        raise ConfigError(f"{path} is no result of `hal parity --json`")
    return Parity(path.name, [{"simulated": False, "samples": "", **row, **_shown_of(row)} for row in rows])


def _shown_of(row: dict[str, Any]) -> dict[str, Any]:
    reasons = row.get("reasons") or []
    return {
        "worst": _number(row.get("worst_error_in_tolerances")),
        "reasons": "; ".join(map(str, reasons)) if isinstance(reasons, list) else reasons,
    }


def _names(places: list[Path]) -> list[str]:
    """The shortest trailing parts of the paths that distinguish them."""
    parts = [p.absolute().parts for p in places]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"the same run is given twice: {', '.join(map(str, places))}")


def _run(path: Path, name: str) -> Run:
    record = _json(path)
    if not isinstance(record, dict):
        raise ConfigError(f"{path} is not the record of a run: it holds no JSON object")
    fields: dict[str, Any] = {key: record.get(key, {}) for key in ("config", "versions", "device", "fallbacks")}
    for key, table in fields.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path} is not the record of a run: {key} is not a table")
    for key in ("losses", "grad_norms", "evaluations", "step_seconds", "expert_imbalance", "router_entropy"):
        fields[key] = _rows(path, key, record.get(key, []))
    for key in ("tokens_per_second", "model_flops_per_second", "peak_memory_bytes"):
        fields[key] = _number(record.get(key))
    tokenizer = record.get("tokenizer") or {}
    if not isinstance(tokenizer, dict):
        raise ConfigError(f"{path} is not the record of a run: tokenizer is not a table")
    size = _number(tokenizer.get("bytes_per_token"))
    return Run(
        name,
        **fields,
        tokenizer=f"{tokenizer.get('type', '')} {tokenizer.get('fingerprint', '')}".strip(),
        bytes_per_token=size if size is not None and size > _LEAST else None,
        profiles=read_profiles(path.parent / "profile"),
    )


def _rows(path: Path, key: str, rows: Any) -> Rows:
    good = isinstance(rows, list) and all(
        isinstance(r, list) and len(r) == 2 and isinstance(r[0], int) and not isinstance(r[0], bool) for r in rows
    )
    if not good:
        raise ConfigError(f"{path} is not the record of a run: {key} should be a list of [iteration, value]")
    for n, _ in rows:
        if not 0 <= n < 1 << 53:
            iteration = n if abs(n) < 1 << 62 else f"of {n.bit_length()} bits"
            raise ConfigError(f"{path} is not the record of a run: {key} has an iteration {iteration}")
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
