"""Reads the profiles of a run (profile/rank-N.json). Like run.json they are not trusted: what has another form than
the trainer writes is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal.profiling.waiting import Collective, waiting

from ...config.schema import ConfigError

_MOST = 1e100
_LARGEST_FILE = 256 << 20


@dataclass(frozen=True)
class Profile:
    """The profile of one rank. Times are seconds from the start of the first profiled step of any rank.

    steps: (iteration, begin, end). ops: rows of hal.profiling.summary. spans: (kind, name, begin, end) of phases and of
    the times in which collectives blocked the rank. memory: (times, bytes by kind, peak by kind), or None.
    """

    rank: int
    world: int
    steps: tuple[tuple[int, float, float], ...]
    ops: tuple[Mapping[str, Any], ...]
    spans: tuple[tuple[str, str, float, float], ...]
    collectives: tuple[Collective, ...]
    waited: float
    seconds: float
    op_seconds: float
    blocked_seconds: float
    phases: Mapping[str, float]
    product_rates: Mapping[str, float]
    copy_rate: float | None
    mfu: float | None
    of_host: bool
    memory: tuple[list[float], Mapping[str, list[float]], Mapping[str, float]] | None


def read_profiles(folder: Path) -> tuple[Profile, ...]:
    """The profiles in a folder, by rank; empty if there are none. Raises ConfigError for a file that is none."""
    files = sorted(folder.glob("rank-*.json"))
    records = {path: _read(path) for path in files if path.name.count(".") == 1}
    if not records:
        return ()
    try:
        start = min(int(step[1]) for record in records.values() for step in record["steps"])
        of_rank = {path: [_collective(row) for row in record["collectives"]] for path, record in records.items()}
        ranks = {int(record["rank"]): of_rank[path] for path, record in records.items()}
        if len(ranks) != len(records):
            raise ValueError("two files are of the same rank")
        waited = {rank: sum(seconds for _, seconds in rows) for rank, rows in waiting(ranks).items()}
        profiles = [
            _profile(record, tuple(of_rank[path]), waited[int(record["rank"])], start)
            for path, record in records.items()
        ]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{folder} holds no profile of a run: {type(error).__name__}: {error}") from None
    return tuple(sorted(profiles, key=lambda p: p.rank))


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"it has more than {_LARGEST_FILE >> 20} MiB")
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path} is no profile of a run: it holds no JSON object")
    return record


def _profile(record: Mapping[str, Any], collectives: tuple[Collective, ...], waited: float, start: int) -> Profile:
    def at(nanoseconds: Any) -> float:
        return _number(int(nanoseconds) - start) * 1e-9

    ceilings, memory = record["ceilings"], record["memory"]
    return Profile(
        rank=int(record["rank"]),
        world=int(record["world"]),
        steps=tuple((int(n), at(begin), at(end)) for n, begin, end in record["steps"]),
        ops=tuple(_op(row) for row in record["ops"]),
        spans=tuple((str(kind), str(name), at(begin), at(end)) for kind, name, begin, end in record["spans"]),
        collectives=collectives,
        waited=waited,
        seconds=_number(record["seconds"]),
        op_seconds=_number(record["op_seconds"]),
        blocked_seconds=_number(record["blocked_seconds"]),
        phases={str(name): _number(seconds) for name, seconds in record["phases"].items()},
        product_rates={} if ceilings is None else {str(k): _number(v) for k, v in ceilings["products"].items()},
        copy_rate=None if ceilings is None else _number(ceilings["copy"]),
        mfu=None if record["mfu"] is None else _number(record["mfu"]),
        of_host=bool(record["asynchronous"]) and not bool(record["waits_for_device"]),
        memory=None if memory is None else _memory(memory),
    )


def _op(row: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: str(row[name]) for name in ("op", "implementation", "direction")}
    numbers = {name: _number(row[name]) for name in ("calls", "seconds", "flops", "bytes")}
    share = row.get("roofline")
    refused = "; ".join(f"{id}: {why}" for id, why in row["refused"].items())
    bound = str(row.get("bound") or "")
    return {
        **texts,
        **numbers,
        "bound": bound,
        "roofline": None if share is None else _number(share),
        "refused": refused,
    }


def _memory(record: Mapping[str, Any]) -> tuple[list[float], Mapping[str, list[float]], Mapping[str, float]]:
    times = [_number(t) for t in record["times"]]
    curves = {str(kind): [_number(b) for b in curve] for kind, curve in record["bytes"].items()}
    if any(len(curve) != len(times) for curve in curves.values()):
        raise ValueError("the curves of memory have different lengths")
    return times, curves, {str(kind): _number(size) for kind, size in record["peak"].items()}


def _collective(row: Any) -> Collective:
    group, number, name, size, arrived, begin, end = row
    numbers = [int(_number(n)) for n in (number, size, arrived, begin, end)]
    return Collective(str(group), numbers[0], str(name), numbers[1], numbers[2], (numbers[3], numbers[4]))


def _number(value: Any) -> float:
    """A finite number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST or math.isnan(value):
        raise ValueError(f"{value!r} is not a number of a profile")
    return value
